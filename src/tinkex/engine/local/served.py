"""One base model with everything that hangs on it; touched by the engine's thread only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tinkex.engine.checkpoints import adapter_file
from tinkex.engine.failures import failure, user_error
from tinkex.engine.local.budgets import sizes
from tinkex.engine.local.versions import Versions
from tinkex.engine.lora import wrap
from tinkex.engine.models.loader import DeferredModel
from tinkex.engine.protocol import ModelSpec, ModelText, SampleResult
from tinkex.engine.sampler import (
    BASE,
    LoraAdapters,
    Sampler,
    SamplerSettings,
    cache_bytes_per_token,
)
from tinkex.engine.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tinkex.engine.checkpoints.parking import Parking
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.local.budgets import Budgets
    from tinkex.engine.local.relay import TokenRelay
    from tinkex.engine.local_settings import LocalSettings
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.models.tokenizer import ModelTokenizer
    from tinkex.engine.protocol import OnToken, SampleOp, Weights
    from tinkex.engine.sampler.request import SampleRun
    from tinkex.errors import RequestFailedError

    Tell = Callable[["SampleResult | RequestFailedError"], None]


class Served:
    """A trainer, a sampler, and the versions that samples name."""

    def __init__(
        self,
        model: BaseModel,
        settings: LocalSettings,
        budgets: Budgets,
        parking: Parking,
        relay: TokenRelay,
    ) -> None:
        decoder = model.decoder
        config, weight = decoder.config, decoder.unembed_VD
        self.config = config
        self._device = weight.device
        self._parking = parking
        self._relay = relay
        self.name = config.name
        chosen = sizes(settings, weight.device)
        self.trainer = Trainer(
            decoder,
            weight.device,
            weight.dtype,
            max_pass_tokens=settings.max_pass_tokens,
            logits_bytes=chosen.logits_bytes,
            memory_bytes=budgets.pass_bytes,
            parking=parking,
            strict=settings.strict,
        )
        # Mutable state besides the trainer's: versions, whom to tell about which sample, and
        # tokens so far.
        copied_as = weight.dtype if decoder.backend.copies_adapters else None
        self.versions = Versions(parking, config.name, copied_as)
        self._waiting: dict[SampleRun, Tell] = {}
        self.counts: Counter[str] = Counter()
        sampling = SamplerSettings(
            cache_tokens=budgets.cache_bytes // cache_bytes_per_token(config, weight.dtype),
            pass_tokens=chosen.sample_tokens,
            max_sequences=chosen.sequences,
            logit_rows=chosen.logit_rows,
            strict=settings.strict,
        )
        self._block_size = sampling.block_size
        self._sampler = Sampler(
            decoder,
            sampling,
            adapters=LoraAdapters(
                decoder,
                self.versions.weights,
                peek=self.versions.peek,
                copies=self.versions.copies,
            ),
            decode=None if model.tokenizer is None else model.tokenizer.decode,
            fits=self.versions.fit,
        )

    def frozen(self, snapshot: str) -> adapter_file.State:
        """What was published under a name, in host memory."""
        version = self.versions.find(snapshot_name(snapshot))
        weights = None if version is None else self.versions.peek(version)
        if weights is None:
            raise _not_published(snapshot)
        return adapter_file.State(
            base_model=self.config.name,
            weights=wrap(self.config, weights.lora, weights.flat_P.cpu()),
        )

    def version(self, weights: Weights) -> str | None:
        """The version that a sample asks for; None when its file has to be read first."""
        if weights.snapshot is not None:
            found = self.versions.find(snapshot_name(weights.snapshot))
            if found is None:
                raise _not_published(weights.snapshot)
            return found
        if weights.location is None:
            return BASE
        return self.versions.find(saved_name(weights.location))

    def add_saved(self, location: str, state: adapter_file.State) -> str:
        """Make what was read from a file a version."""
        flat_P = state.weights.flat_P
        self._parking.check(location, flat_P.numel() * flat_P.itemsize)
        weights = wrap(self.config, state.weights.lora, flat_P.to(self._device))
        return self.versions.add(saved_name(location), weights, in_file=True)

    def submit(
        self, op: SampleOp, version: str, on_token: OnToken | None, tell: Tell
    ) -> Callable[[], None]:
        """Begin a sample; returns what cancels it. Raises `InputError` if it cannot run."""
        run = self._sampler.submit(op, version=version, on_token=on_token)
        self._waiting[run] = tell
        self.versions.begin(version)

        def cancel() -> None:
            if self._leave(run) is not None:
                self._sampler.cancel(run)

        return cancel

    @property
    def idle(self) -> bool:
        """Whether no sample runs."""
        return self._sampler.idle

    def step(self) -> None:
        """Run one pass of the sampler, and tell those whose samples ended."""
        try:
            with self._parking.holding():
                ended = self._sampler.step()
        except Exception as error:  # noqa: BLE001 - ends in the samples' errors
            self._relay.flush()
            self._fail_all(error)
            return
        # Before anybody is told of an end: the last tokens come first.
        self._relay.flush()
        for run in ended:
            tell = self._leave(run)
            outcome = run.error or run.result
            if isinstance(outcome, SampleResult):
                self.counts["tokens_prompt_total"] += outcome.prompt_tokens
                self.counts["tokens_generated_total"] += outcome.generated_tokens
            if tell is not None and outcome is not None:
                tell(outcome)

    def stats(self) -> dict[str, float]:
        """How much it does and did; may be asked from any thread, so it only reads numbers."""
        sampler, block = self._sampler, self._block_size
        return {
            "samples_running": len(self._waiting),
            "kv_blocks_used": (sampler.cache_tokens - sampler.free_tokens) // block,
            "kv_blocks_total": sampler.cache_tokens // block,
            "preemptions_total": sampler.preemptions,
            **self.counts,
        }

    def _leave(self, run: SampleRun) -> Tell | None:
        tell = self._waiting.pop(run, None)
        if tell is not None:
            self.versions.end(run.version)
        return tell

    def _fail_all(self, error: BaseException) -> None:
        """A step that failed as a whole: nobody knows how far it came, so nobody goes on."""
        for run in list(self._waiting):
            tell = self._leave(run)
            self._sampler.cancel(run)
            if tell is not None:
                tell(failure(error, "while sampling", run.op.op_id))


def _not_published(snapshot: str) -> RequestFailedError:
    return user_error(f"snapshot {snapshot!r} is not published")


def spec_of(model: BaseModel | DeferredModel) -> ModelSpec:
    """What a server is told about a base model."""
    config = model.config if isinstance(model, DeferredModel) else model.decoder.config
    return ModelSpec(
        name=config.name,
        max_context_length=config.max_context,
        vocab_size=config.vocab_size,
        arch=config.arch,
        text=None if model.tokenizer is None else _text(model.tokenizer, config),
    )


def device_of(model: BaseModel | DeferredModel) -> torch.device:
    """Where a base model is, or will be."""
    return model.device if isinstance(model, DeferredModel) else model.decoder.unembed_VD.device


def _text(tokenizer: ModelTokenizer, config: DecoderConfig) -> ModelText:
    return ModelText(
        tokenizer_json=tokenizer.json.encode(),
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tuple(config.eos_token_ids),
    )


def snapshot_name(snapshot: str) -> str:
    """What a snapshot is called among the versions."""
    return f"snapshot:{snapshot}"


def saved_name(location: str) -> str:
    """What a saved adapter is called among the versions."""
    return f"saved:{location}"
