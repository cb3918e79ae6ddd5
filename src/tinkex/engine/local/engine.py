"""`Engine` on this machine: every method hands work to one thread and waits for it.

That thread owns all tensors (`thread.py`); files are read and written beside it. Work on the
same model, snapshot or location runs in the order it was submitted; anything else may run
between two training passes of a long batch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tinkex.engine import checkpoints
from tinkex.engine.failures import user_error
from tinkex.engine.local.budgets import budgets
from tinkex.engine.local.served import Served, saved_name, snapshot_name
from tinkex.engine.local.tasks import Task
from tinkex.engine.local.thread import EngineThread
from tinkex.engine.parking import Parking
from tinkex.engine.peft import export_peft
from tinkex.engine.sampler import BASE
from tinkex.engine.scratch import ScratchFolder
from tinkex.engine.settings import LocalSettings
from tinkex.engine.tensor_files import write_atomically
from tinkex.errors import ClosedError, InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tinkex.clock import Clock
    from tinkex.engine.base import (
        AdapterSpec,
        ModelSpec,
        OnToken,
        OptimOp,
        OptimResult,
        SampleOp,
        SampleResult,
        SavedAdapter,
        TrainOp,
        TrainResult,
    )
    from tinkex.engine.local.tasks import Steps
    from tinkex.engine.models.loader import BaseModel

_log = logging.getLogger(__name__)


class LocalEngine:
    """Trains and samples on one device. Close it, or use it as an async context manager."""

    def __init__(
        self,
        models: Sequence[BaseModel],
        folder: Path,
        settings: LocalSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not models:
            raise InputError("give at least one base model", "models")
        settings = settings or LocalSettings()
        device = models[0].decoder.unembed_VD.device
        room = budgets(settings, device, len(models))
        self._settings = settings
        self._parking = Parking(
            device,
            device_bytes=room.adapter_bytes,
            host_bytes=room.host_bytes,
            folder=ScratchFolder(settings.parking_folder or folder, ".parked-"),
        )
        made = [Served(model, folder, settings, room, self._parking) for model in models]
        self._served = {served.spec.name: served for served in made}
        # Mutable state: which base model each adapter and snapshot belongs to (the thread's),
        # and every answer that somebody waits for (the callers').
        self._homes: dict[str, Served] = {}
        self._published: dict[str, Served] = {}
        self._owed: set[asyncio.Future[Any]] = set()
        self._thread = EngineThread(made, self._end_all, clock)
        self._thread.start()

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return [served.spec for served in self._served.values()]

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter on its base model."""

        def create() -> None:
            if spec.model_id in self._homes:
                raise user_error(f"model {spec.model_id!r} exists already")
            served = self._base(spec.base_model)
            served.trainer.create(spec)
            self._homes[spec.model_id] = served

        await self._do(_once(create), _model(spec.model_id))

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state too when asked."""

        def load() -> Steps:
            served = self._home(model_id)
            state = yield partial(self._read, location, served)
            served.trainer.restore(model_id, state, optimizer=optimizer)

        await self._do(load(), _model(model_id), _saved(location))

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter; complete and durable when it returns."""

        def save() -> Steps:
            served = self._home(model_id)
            state = served.trainer.state(model_id, optimizer=optimizer)
            saved = yield partial(checkpoints.save, state, served.path(location))
            served.versions.retire(saved_name(location))
            return saved

        return await self._do(save(), _model(model_id), _saved(location))

    async def drop_adapter(self, model_id: str) -> None:
        """Free an adapter; unknown names are fine."""

        def drop() -> None:
            served = self._homes.pop(model_id, None)
            if served is not None:
                served.trainer.drop(model_id)

        await self._do(_once(drop), _model(model_id))

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations at once.

        Cancelled, it ends after the pass that runs; each operation is then done or untouched.
        """
        return await self._do(
            self._train(batch), *(_model(op.model_id) for op in batch), training=True
        )

    def _train(self, batch: Sequence[TrainOp]) -> Steps:
        answers: dict[int, TrainResult | RequestFailedError] = {}
        by_model = self._by_model(batch, answers)
        for number, (served, places) in enumerate(by_model):
            if number:
                yield
            ops = [batch[place] for place in places]
            found = yield from served.trainer.passes(ops, self._pass_tokens)
            answers.update(zip(places, found, strict=True))
        return [answers[place] for place in range(len(batch))]

    def _pass_tokens(self) -> int:
        """How large the next training pass may be: smaller while a stream waits for its end."""
        if self._thread.sampling:
            return self._settings.shared_pass_tokens
        return self._settings.max_pass_tokens

    async def optim_step(
        self, batch: Sequence[OptimOp]
    ) -> Sequence[OptimResult | RequestFailedError]:
        """Apply and clear the gradients of many adapters."""
        return await self._do(self._optim_step(batch), *(_model(op.model_id) for op in batch))

    def _optim_step(self, batch: Sequence[OptimOp]) -> Steps:
        answers: dict[int, OptimResult | RequestFailedError] = {}
        for served, places in self._by_model(batch, answers):
            for place in places:
                (answers[place],) = served.trainer.optim_step([batch[place]])
                yield
        return [answers[place] for place in range(len(batch))]

    def _by_model(
        self, batch: Sequence[TrainOp] | Sequence[OptimOp], answers: dict[int, Any]
    ) -> Iterator[tuple[Served, list[int]]]:
        """Places of the batch by base model; operations on unknown adapters are answered."""
        places: dict[str, list[int]] = {}
        for place, op in enumerate(batch):
            served = self._homes.get(op.model_id)
            if served is None:
                answers[place] = user_error(f"model {op.model_id!r} is not loaded", op.op_id)
            else:
                places.setdefault(served.spec.name, []).append(place)
        return ((self._served[name], found) for name, found in places.items())

    async def publish(self, model_id: str, snapshot: str) -> None:
        """Freeze an adapter as it is for sampling under the name `snapshot`."""

        def publish() -> None:
            served, before = self._home(model_id), self._published.get(snapshot)
            weights = served.trainer.snapshot(model_id).weights
            served.versions.add(snapshot_name(snapshot), weights)
            if before is not None and before is not served:
                before.versions.retire(snapshot_name(snapshot))
            self._published[snapshot] = served

        await self._do(_once(publish), _model(model_id), _snapshot(snapshot))

    async def drop_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot, unknown names are fine; samples that use it keep it."""

        def drop() -> None:
            served = self._published.pop(snapshot, None)
            if served is not None:
                served.versions.retire(snapshot_name(snapshot))

        await self._do(_once(drop), _snapshot(snapshot))

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        """Sample; cancelling the call frees its place."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SampleResult] = loop.create_future()
        weights = op.weights
        cancels: list[Callable[[], None]] = []

        def tell(outcome: object) -> None:
            _hop(loop, lambda: _settle(answer, outcome))

        def submit() -> Steps:
            served = self._base(weights.base_model)
            version = served.version(weights)
            if version is None:
                assert weights.location is not None
                state = yield partial(self._read, weights.location, served)
                version = served.add_saved(weights.location, state)
            cancels.append(served.submit(op, version, _relay(loop, on_token), tell))

        keys = [_snapshot(weights.snapshot)] if weights.snapshot is not None else []
        keys += [_saved(weights.location)] if weights.location is not None else []
        try:
            await self._do(submit(), *keys)
            result: SampleResult = await self._answer(answer)
        except asyncio.CancelledError:
            # It may just have been submitted, so the thread looks when it comes to this.
            with suppress(ClosedError):
                self._thread.post(_errand(lambda: [cancel() for cancel in cancels]))
            raise
        return replace(result, version=weights.snapshot or weights.location or BASE)

    async def copy_saved(self, source: str, target: str) -> None:
        """Copy what was saved at one location to another."""

        def copy() -> Steps:
            served, path = self._find(source)
            yield partial(write_atomically, served.path(target), partial(_copy, path))
            served.versions.retire(saved_name(target))

        await self._do(copy(), _saved(source), _saved(target))

    async def delete_saved(self, location: str) -> None:
        """Delete a saved adapter; samples that use it keep it until they end."""

        def delete() -> None:
            for served in self._served.values():
                served.path(location).unlink(missing_ok=True)
                served.versions.retire(saved_name(location))

        await self._do(_once(delete), _saved(location))

    async def export_saved(self, location: str) -> Mapping[str, bytes]:
        """The files of a saved adapter in PEFT's layout, by relative name."""

        def export() -> Steps:
            served, _ = self._find(location)
            state = yield partial(self._read, location, served)
            return (yield partial(export_peft, state.weights))

        return await self._do(export(), _saved(location))

    def _read(self, location: str, served: Served) -> checkpoints.State:
        return checkpoints.load(self._find(location)[1], served.config)

    def _find(self, location: str) -> tuple[Served, Path]:
        for served in self._served.values():
            path = served.path(location)
            if path.exists():
                return served, path
        raise user_error(f"nothing is saved at {location!r}")

    def _base(self, name: str) -> Served:
        served = self._served.get(name)
        if served is None:
            raise user_error(f"no base model {name!r} here; there are: {', '.join(self._served)}")
        return served

    def _home(self, model_id: str) -> Served:
        served = self._homes.get(model_id)
        if served is None:
            raise user_error(f"model {model_id!r} is not loaded")
        return served

    async def _do(self, steps: Steps, *keys: str, training: bool = False) -> Any:
        """Run steps on the engine's thread, in turn with whatever has one of these keys."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(outcome: object) -> None:
            _hop(loop, lambda: _settle(answer, outcome))

        def wanted() -> bool:
            return not answer.cancelled()

        self._thread.post(
            Task(steps=steps, settle=settle, keys=frozenset(keys), training=training, wanted=wanted)
        )
        return await self._answer(answer)

    async def _answer(self, answer: asyncio.Future[Any]) -> Any:
        """Wait for an answer that `close` would end, too."""
        self._owed.add(answer)
        try:
            return await answer
        finally:
            self._owed.discard(answer)

    async def close(self) -> None:
        """End the thread after what it is doing now; whoever still waits gets a `ClosedError`."""
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self._parking.close)

    def _end_all(self) -> None:
        error = ClosedError("the engine was closed")
        for answer in list(self._owed):
            _hop(answer.get_loop(), partial(_settle, answer, error))

    async def __aenter__(self) -> LocalEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _model(model_id: str) -> str:
    return f"model:{model_id}"


def _snapshot(snapshot: str) -> str:
    return f"snapshot:{snapshot}"


def _saved(location: str) -> str:
    return f"saved:{location}"


def _once(action: Callable[[], object]) -> Steps:
    """Steps of which there is one."""
    return action()
    yield


def _errand(action: Callable[[], object]) -> Task:
    """A task that nobody waits for."""
    return Task(steps=_once(action), settle=lambda _: None)


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
