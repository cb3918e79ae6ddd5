"""One base model with everything that hangs on it; touched by the engine's thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from tinkex.engine.base import ModelSpec
from tinkex.engine.failures import failure, user_error
from tinkex.engine.local.budgets import sizes
from tinkex.engine.local.versions import Versions
from tinkex.engine.lora import wrap
from tinkex.engine.sampler import (
    BASE,
    LoraAdapters,
    Sampler,
    SamplerSettings,
    cache_bytes_per_token,
)
from tinkex.engine.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinkex.engine import checkpoints
    from tinkex.engine.base import OnToken, SampleOp, SampleResult, Weights
    from tinkex.engine.local.budgets import Budgets
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.parking import Parking
    from tinkex.engine.sampler.request import SampleRun
    from tinkex.engine.settings import LocalSettings
    from tinkex.errors import RequestFailedError

    Tell = Callable[["SampleResult | RequestFailedError"], None]


class Served:
    """A trainer, a sampler, and the versions that samples name."""

    def __init__(
        self,
        model: BaseModel,
        folder: Path,
        settings: LocalSettings,
        budgets: Budgets,
        parking: Parking,
    ) -> None:
        decoder = model.decoder
        config, weight = decoder.config, decoder.unembed_VD
        self.config = config
        self._device = weight.device
        self._parking = parking
        self._folder = folder / quote(config.name, safe="")
        self.spec = ModelSpec(
            name=config.name,
            max_context_length=config.max_context,
            vocab_size=config.vocab_size,
            arch=config.arch,
        )
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
        # Mutable state besides the trainer's: versions, and whom to tell about which sample.
        self.versions = Versions(parking, config.name)
        self._waiting: dict[SampleRun, Tell] = {}
        self._sampler = Sampler(
            decoder,
            SamplerSettings(
                cache_tokens=budgets.cache_bytes // cache_bytes_per_token(config, weight.dtype),
                pass_tokens=chosen.sample_tokens,
                max_sequences=chosen.sequences,
                logit_rows=chosen.logit_rows,
                strict=settings.strict,
            ),
            adapters=LoraAdapters(decoder, self.versions.weights),
            decode=None if model.tokenizer is None else model.tokenizer.decode,
        )

    def path(self, location: str) -> Path:
        """Where a saved adapter lies; a location is a name, never a path of its own."""
        return self._folder / f"{quote(location, safe='')}.safetensors"

    def version(self, weights: Weights) -> str | None:
        """The version that a sample asks for; None when its file has to be read first."""
        if weights.snapshot is not None:
            found = self.versions.find(snapshot_name(weights.snapshot))
            if found is None:
                raise user_error(f"snapshot {weights.snapshot!r} is not published")
            return found
        if weights.location is None:
            return BASE
        return self.versions.find(saved_name(weights.location))

    def add_saved(self, location: str, state: checkpoints.State) -> str:
        """Make what was read from a file a version."""
        flat_P = state.weights.flat_P
        self._parking.check(location, flat_P.numel() * flat_P.itemsize)
        weights = wrap(self.config, state.weights.lora, flat_P.to(self._device))
        return self.versions.add(saved_name(location), weights)

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
            self._fail_all(error)
            return
        for run in ended:
            tell = self._leave(run)
            outcome = run.error or run.result
            if tell is not None and outcome is not None:
                tell(outcome)

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


def snapshot_name(snapshot: str) -> str:
    """What a snapshot is called among the versions."""
    return f"snapshot:{snapshot}"


def saved_name(location: str) -> str:
    """What a saved adapter is called among the versions."""
    return f"saved:{location}"
