"""The PyTorch engine on this machine: `Engine` over a trainer and a sampler per base model.

One thread owns all tensors. It takes training work in the order it was submitted, one batch at a
time, and gives every sampler one pass in between, so neither waits for the other to run dry. The
async methods hand work to that thread and wait for it on the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import torch

from tinkex.engine import checkpoints
from tinkex.engine.base import ModelSpec
from tinkex.engine.lora import wrap
from tinkex.engine.peft import export_peft
from tinkex.engine.sampler import (
    BASE,
    LoraAdapters,
    Sampler,
    SamplerSettings,
    cache_bytes_per_token,
)
from tinkex.engine.trainer import Trainer
from tinkex.errors import ClosedError, InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tinkex.engine.base import (
        AdapterSpec,
        OnToken,
        OptimOp,
        OptimResult,
        SampleOp,
        SampleResult,
        SavedAdapter,
        TrainOp,
        TrainResult,
        Weights,
    )
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.sampler.request import SampleRun

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How much of the machine the engine may use."""

    cache_bytes: int = 1 << 30
    """Room of the key/value cache of each base model."""
    max_pass_tokens: int = 8192
    max_sequences: int = 64


class _Served:
    """One base model with everything that hangs on it; touched by the engine's thread only."""

    def __init__(self, model: BaseModel, folder: Path, settings: LocalSettings) -> None:
        decoder = model.decoder
        config = decoder.config
        weight = decoder.unembed_VD
        self.config = config
        self.device = weight.device
        self.folder = folder / quote(config.name, safe="")
        self.spec = ModelSpec(
            name=config.name,
            max_context_length=config.max_context,
            vocab_size=config.vocab_size,
            arch=config.arch,
        )
        self.trainer = Trainer(
            decoder, weight.device, weight.dtype, max_pass_tokens=settings.max_pass_tokens
        )
        # Mutable state: weights by version, which keeps them for good, and versions to forget
        # as soon as no sample uses them.
        self.versions: dict[str, LoraWeights] = {}
        self.unwanted: set[str] = set()
        tokens = settings.cache_bytes // cache_bytes_per_token(config, weight.dtype)
        self.sampler = Sampler(
            decoder,
            SamplerSettings(cache_tokens=tokens, max_sequences=settings.max_sequences),
            adapters=LoraAdapters(decoder, self.weights_of),
            decode=None if model.tokenizer is None else model.tokenizer.decode,
        )

    def weights_of(self, version: str) -> LoraWeights | None:
        """The weights of a version; None for the base model."""
        return None if version == BASE else self.versions[version]

    def path(self, location: str) -> Path:
        """Where a saved adapter lies; a location is a name, never a path of its own."""
        return self.folder / f"{quote(location, safe='')}.safetensors"


class LocalEngine:
    """Trains and samples on one device. Close it, or use it as an async context manager."""

    def __init__(
        self,
        models: Sequence[BaseModel],
        folder: Path,
        settings: LocalSettings | None = None,
    ) -> None:
        if not models:
            raise InputError("give at least one base model", "models")
        made = [_Served(model, folder, settings or LocalSettings()) for model in models]
        self._served = {served.spec.name: served for served in made}
        # Mutable state: work that waits for the thread (guarded by the condition), which model
        # each adapter and snapshot belongs to, who waits for which sample, and every answer that
        # somebody waits for.
        self._work: deque[Callable[[], None]] = deque()
        self._bell = threading.Condition()
        self._closed = False
        self._homes: dict[str, _Served] = {}
        self._waiting: dict[SampleRun, Callable[[SampleRun], None]] = {}
        self._owed: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)
        self._thread.start()

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return [served.spec for served in self._served.values()]

    # -- adapters -----------------------------------------------------------------------------

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter on its base model."""

        def create() -> None:
            served = self._base(spec.base_model)
            served.trainer.create(spec)
            self._homes[spec.model_id] = served

        await self._do(create)

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state too when asked."""

        def load() -> None:
            served = self._home(model_id)
            served.trainer.load(model_id, self._saved(location)[1], optimizer=optimizer)

        await self._do(load)

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter; complete and durable when it returns."""

        def save() -> SavedAdapter:
            served = self._home(model_id)
            served.folder.mkdir(parents=True, exist_ok=True)
            return served.trainer.save(model_id, served.path(location), optimizer=optimizer)

        return await self._do(save)

    async def drop_adapter(self, model_id: str) -> None:
        """Free an adapter; unknown names are fine."""

        def drop() -> None:
            served = self._homes.pop(model_id, None)
            if served is not None:
                served.trainer.drop(model_id)

        await self._do(drop)

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations at once."""
        return await self._do(lambda: self._split(batch, lambda served: served.trainer.train))

    async def optim_step(
        self, batch: Sequence[OptimOp]
    ) -> Sequence[OptimResult | RequestFailedError]:
        """Apply and clear the gradients of many adapters."""
        return await self._do(lambda: self._split(batch, lambda served: served.trainer.optim_step))

    def _split(
        self,
        batch: Sequence[Any],
        method: Callable[[_Served], Callable[[Sequence[Any]], Sequence[T]]],
    ) -> list[T | RequestFailedError]:
        """One call for each base model; answers in the order of the batch."""
        answers: dict[int, T | RequestFailedError] = {}
        by_model: dict[str, list[int]] = {}
        for place, op in enumerate(batch):
            try:
                by_model.setdefault(self._home(op.model_id).spec.name, []).append(place)
            except RequestFailedError as error:
                answers[place] = error
        for name, places in by_model.items():
            found = method(self._served[name])([batch[place] for place in places])
            answers.update(zip(places, found, strict=True))
        return [answers[place] for place in range(len(batch))]

    # -- sampling -----------------------------------------------------------------------------

    async def publish(self, model_id: str, snapshot: str) -> None:
        """Freeze an adapter as it is for sampling under the name `snapshot`."""

        def publish() -> None:
            served = self._home(model_id)
            served.versions[snapshot] = served.trainer.snapshot(model_id).weights
            self._homes[snapshot] = served

        await self._do(publish)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; unknown names are fine."""

        def drop() -> None:
            served = self._homes.pop(snapshot, None)
            if served is not None:
                served.unwanted.add(snapshot)
                self._forget(served)

        await self._do(drop)

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        """Sample; cancelling the call frees its place."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SampleResult] = loop.create_future()

        def tell(run: SampleRun) -> None:
            _hop(loop, lambda: _settle(answer, run.error or run.result))

        def submit() -> tuple[_Served, SampleRun]:
            served = self._base(op.weights.base_model)
            version = self._version(served, op.weights)
            run = served.sampler.submit(op, version=version, on_token=_relay(loop, on_token))
            self._waiting[run] = tell
            return served, run

        served, run = await self._do(submit)
        try:
            return await self._answer(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                self._post(lambda: self._cancel(served, run))
            raise

    def _cancel(self, served: _Served, run: SampleRun) -> None:
        self._waiting.pop(run, None)
        served.sampler.cancel(run)

    def _version(self, served: _Served, weights: Weights) -> str:
        if weights.snapshot is not None:
            if weights.snapshot not in served.versions.keys() - served.unwanted:
                raise _user(f"snapshot {weights.snapshot!r} is not published")
            return weights.snapshot
        if weights.location is None:
            return BASE
        version = f"saved:{weights.location}"
        if version not in served.versions.keys() - served.unwanted:
            state = checkpoints.load(self._saved(weights.location)[1], served.config)
            flat_P = state.weights.flat_P.to(served.device)
            served.versions[version] = wrap(served.config, state.weights.lora, flat_P)
            served.unwanted.discard(version)
        return version

    # -- what was saved -----------------------------------------------------------------------

    async def copy_saved(self, source: str, target: str) -> None:
        """Copy what was saved at one location to another."""

        def copy() -> None:
            served, path = self._saved(source)
            checkpoints.write_atomically(served.path(target), functools.partial(_copy, path))

        await self._do(copy)

    async def delete_saved(self, location: str) -> None:
        """Delete a saved adapter; samples that use it keep it until they end."""

        def delete() -> None:
            for served in self._served.values():
                served.path(location).unlink(missing_ok=True)
                served.unwanted.add(f"saved:{location}")
                self._forget(served)

        await self._do(delete)

    async def export_saved(self, location: str) -> Mapping[str, bytes]:
        """The files of a saved adapter in PEFT's layout, by relative name."""

        def export() -> Mapping[str, bytes]:
            served, path = self._saved(location)
            return export_peft(checkpoints.load(path, served.config).weights)

        return await self._do(export)

    def _saved(self, location: str) -> tuple[_Served, Path]:
        for served in self._served.values():
            path = served.path(location)
            if path.exists():
                return served, path
        raise _user(f"nothing is saved at {location!r}")

    def _base(self, name: str) -> _Served:
        served = self._served.get(name)
        if served is None:
            raise _user(f"no base model {name!r} here; there are: {', '.join(self._served)}")
        return served

    def _home(self, model_id: str) -> _Served:
        served = self._homes.get(model_id)
        if served is None:
            raise _user(f"model {model_id!r} is not loaded")
        return served

    # -- the thread ---------------------------------------------------------------------------

    async def _do(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            outcome: T | BaseException
            try:
                outcome = work()
            except InputError as error:
                outcome = _user(str(error))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                outcome = error
            _hop(loop, lambda: _settle(answer, outcome))

        self._post(run)
        return await self._answer(answer)

    async def _answer(self, answer: asyncio.Future[T]) -> T:
        """Wait for an answer that `close` would end, too."""
        self._owed.add(answer)
        try:
            return await answer
        finally:
            self._owed.discard(answer)

    def _post(self, work: Callable[[], None]) -> None:
        with self._bell:
            if self._closed:
                raise ClosedError("the engine is closed")
            self._work.append(work)
            self._bell.notify()

    def _run(self) -> None:
        torch.set_grad_enabled(True)
        while True:
            with self._bell:
                while not (self._work or self._closed or self._sampling()):
                    self._bell.wait()
                if self._closed:
                    return
                work = self._work.popleft() if self._work else None
            if work is not None:
                work()
            for served in self._served.values():
                if not served.sampler.idle:
                    self._step(served)

    def _sampling(self) -> bool:
        return any(not served.sampler.idle for served in self._served.values())

    def _forget(self, served: _Served) -> None:
        """Let go of unwanted versions that no sample uses any more."""
        for version in served.unwanted - {run.version for run in self._waiting}:
            served.versions.pop(version, None)
            served.unwanted.discard(version)

    def _step(self, served: _Served) -> None:
        for run in served.sampler.step():
            tell = self._waiting.pop(run, None)
            if tell is not None:
                tell(run)
        if served.unwanted:
            self._forget(served)

    async def close(self) -> None:
        """End the thread after what it is doing now; whoever still waits gets a `ClosedError`."""
        with self._bell:
            self._closed = True
            self._bell.notify()
        await asyncio.to_thread(self._thread.join)
        error = ClosedError("the engine was closed")
        for answer in list(self._owed):
            _hop(answer.get_loop(), functools.partial(_settle, answer, error))

    async def __aenter__(self) -> LocalEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _hop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run `action` on a caller's loop; one that has closed has nobody waiting."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        _log.debug("a caller's loop closed before its answer came")


def _relay(loop: asyncio.AbstractEventLoop, on_token: OnToken | None) -> OnToken | None:
    """`on_token` on the loop of whoever gave it."""
    if on_token is None:
        return None

    def relay(sample: int, token: int, logprob: float) -> None:
        _hop(loop, lambda: on_token(sample, token, logprob))

    return relay


def _settle(answer: asyncio.Future[Any], outcome: object) -> None:
    if answer.done():
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _copy(source: Path, target: Path) -> None:
    shutil.copy(source, target)


def _user(message: str) -> RequestFailedError:
    return RequestFailedError(message, None, "user")
