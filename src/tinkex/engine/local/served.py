"""One base model with its trainer, sampler and versions; used by the engine's thread only."""

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

    Notify = Callable[["SampleResult | RequestFailedError"], None]


class ServedModel:
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
        # Mutable state besides the trainer's and the sampler's: versions, the callback of each
        # running sample, and token counts.
        copied_as = weight.dtype if decoder.backend.copies_adapters else None
        self.versions = Versions(parking, config.name, copied_as)
        self._waiting: dict[SampleRun, Notify] = {}
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
        """A copy of a published snapshot in host memory."""
        version = self.versions.find(snapshot_name(snapshot))
        weights = None if version is None else self.versions.peek(version)
        if weights is None:
            raise _not_published(snapshot)
        return adapter_file.State(
            base_model=self.config.name,
            weights=wrap(self.config, weights.lora, weights.flat_P.cpu()),
        )

    def version(self, weights: Weights) -> str | None:
        """The version of a sample's weights; None when its file has to be read first."""
        if weights.snapshot is not None:
            found = self.versions.find(snapshot_name(weights.snapshot))
            if found is None:
                raise _not_published(weights.snapshot)
            return found
        if weights.location is None:
            return BASE
        return self.versions.find(saved_name(weights.location))

    def add_saved(self, location: str, state: adapter_file.State) -> str:
        """Add weights that were read from a file as a version."""
        flat_P = state.weights.flat_P
        self._parking.check(location, flat_P.numel() * flat_P.itemsize)
        weights = wrap(self.config, state.weights.lora, flat_P.to(self._device))
        return self.versions.add(saved_name(location), weights, in_file=True)

    def submit(
        self, op: SampleOp, version: str, on_token: OnToken | None, notify: Notify
    ) -> Callable[[], None]:
        """Start a sample; returns a function that cancels it. Raises `InputError`."""
        run = self._sampler.submit(op, version=version, on_token=on_token)
        self._waiting[run] = notify
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
        """Run one pass of the sampler, and notify the callers whose samples ended."""
        try:
            with self._parking.holding():
                ended = self._sampler.step()
        except Exception as error:  # noqa: BLE001 - ends in the samples' errors
            self._relay.flush()
            self._fail_all(error)
            return
        # Before the results: a caller must get its last tokens before the end of its sample.
        self._relay.flush()
        for run in ended:
            notify = self._leave(run)
            outcome = run.error or run.result
            if isinstance(outcome, SampleResult):
                self.counts["tokens_prompt_total"] += outcome.prompt_tokens
                self.counts["tokens_generated_total"] += outcome.generated_tokens
            if notify is not None and outcome is not None:
                notify(outcome)

    def stats(self) -> dict[str, float]:
        """Gauges and counters; called from any thread, so it only reads single numbers."""
        sampler, block = self._sampler, self._block_size
        return {
            "samples_running": len(self._waiting),
            "kv_blocks_used": (sampler.cache_tokens - sampler.free_tokens) // block,
            "kv_blocks_total": sampler.cache_tokens // block,
            "preemptions_total": sampler.preemptions,
            **self.counts,
        }

    def _leave(self, run: SampleRun) -> Notify | None:
        notify = self._waiting.pop(run, None)
        if notify is not None:
            self.versions.end(run.version)
        return notify

    def _fail_all(self, error: BaseException) -> None:
        """A step failed as a whole; its progress is unknown, so every sample fails."""
        for run in list(self._waiting):
            notify = self._leave(run)
            self._sampler.cancel(run)
            if notify is not None:
                notify(failure(error, "while sampling", run.op.op_id))


def _not_published(snapshot: str) -> RequestFailedError:
    return user_error(f"snapshot {snapshot!r} is not published")


def spec_of(model: BaseModel | DeferredModel) -> ModelSpec:
    """The description of a base model for servers."""
    config = model.config if isinstance(model, DeferredModel) else model.decoder.config
    return ModelSpec(
        name=config.name,
        max_context_length=config.max_context,
        vocab_size=config.vocab_size,
        arch=config.arch,
        text=None if model.tokenizer is None else _text(model.tokenizer, config),
    )


def device_of(model: BaseModel | DeferredModel) -> torch.device:
    """The device of a base model."""
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
    """The name of a snapshot in `Versions`."""
    return f"snapshot:{snapshot}"


def saved_name(location: str) -> str:
    """The name of a saved adapter in `Versions`."""
    return f"saved:{location}"
