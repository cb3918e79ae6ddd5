"""`Engine` on this machine: every method submits a task to one thread and waits for it.

That thread owns all tensors (`thread.py`); files are read and written on other threads. Work on the
same model, snapshot or location runs in the order of submission; other work may run between two
training passes of a long batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tinkex.engine.checkpoints import adapter_file
from tinkex.engine.checkpoints.parking import Parking
from tinkex.engine.checkpoints.peft import export_peft, import_folder
from tinkex.engine.checkpoints.remote_files import open_saved
from tinkex.engine.checkpoints.scratch import ScratchFolder
from tinkex.engine.failures import user_error
from tinkex.engine.local.budgets import budgets
from tinkex.engine.local.relay import TokenRelay, call_on_loop
from tinkex.engine.local.served import ServedModel, device_of, saved_name, snapshot_name, spec_of
from tinkex.engine.local.thread import EngineTask, EngineThread
from tinkex.engine.local_settings import LocalSettings
from tinkex.engine.models.loader import DeferredModel
from tinkex.engine.protocol import GAUGES, ImportedAdapter, SavedAdapter, TrainResult
from tinkex.engine.sampler import BASE
from tinkex.errors import ClosedError, InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from tinkex.clock import Clock
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.local.thread import Steps
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.protocol import (
        AdapterSpec,
        Layout,
        ModelSpec,
        OnToken,
        OptimOp,
        OptimResult,
        SampleOp,
        SampleResult,
        TrainOp,
    )


class LocalEngine:
    """Trains and samples on one device. Close it, or use it as an async context manager."""

    def __init__(
        self,
        models: Sequence[BaseModel | DeferredModel],
        folder: Path,
        settings: LocalSettings | None = None,
        clock: Clock | None = None,
        artifacts: str | None = None,
    ) -> None:
        if not models:
            raise InputError("give at least one base model", "models")
        settings = settings or LocalSettings()
        device = device_of(models[0])
        room = budgets(settings, device, len(models))
        self._files = open_saved(folder, artifacts, settings.artifact_cache_bytes)
        self._settings = settings
        self._parking = Parking(
            device,
            device_bytes=room.adapter_bytes,
            host_bytes=room.host_bytes,
            folder=ScratchFolder(settings.parking_folder or folder, ".parked-"),
        )
        self._relay = TokenRelay()
        self._serve = partial(
            ServedModel, settings=settings, budgets=room, parking=self._parking, relay=self._relay
        )
        self._models = [spec_of(model) for model in models]
        # Mutable state of the engine's thread: base models that are not loaded yet, those that are,
        # and the base model of each adapter and snapshot. `_pending` belongs to the callers' loops:
        # the answers that they wait for, which `_end_all` fails when the thread ends.
        self._deferred = {m.config.name: m for m in models if isinstance(m, DeferredModel)}
        made = [self._serve(model) for model in models if not isinstance(model, DeferredModel)]
        self._served = {served.name: served for served in made}
        self._samplers = made
        self._served_by_adapter: dict[str, ServedModel] = {}
        self._served_by_snapshot: dict[str, ServedModel] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._thread = EngineThread(self._samplers, self._end_all, clock)
        self._thread.start()

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return self._models

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter on its base model."""

        def create() -> None:
            if spec.model_id in self._served_by_adapter:
                raise user_error(f"model {spec.model_id!r} exists already")
            served = self._base(spec.base_model)
            served.trainer.create(spec)
            self._served_by_adapter[spec.model_id] = served

        await self._do(_once(create), _model(spec.model_id))

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state too when asked."""

        def load() -> Steps:
            served = self._of_adapter(model_id)
            state = yield partial(self._read, location, served)
            served.trainer.restore(model_id, state, optimizer=optimizer)

        await self._do(load(), _model(model_id), _saved(location))

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter; complete and durable when it returns."""

        def save() -> Steps:
            served = self._of_adapter(model_id)
            state = served.trainer.state(model_id, optimizer=optimizer)
            return (yield from self._write(state, location))

        return await self._do(save(), _model(model_id), _saved(location))

    def _write(self, state: adapter_file.State, location: str) -> Steps:
        write, needed = partial(adapter_file.write, state), adapter_file.size_bytes(state)
        size = yield partial(self._files.put, location, write, needed)
        self._retire(location)
        return SavedAdapter(size_bytes=size, has_optimizer=state.moments is not None)

    def _retire(self, location: str) -> None:
        """Make the next sample of a location read its file again."""
        for served in self._served.values():
            served.versions.retire(saved_name(location))

    async def drop_adapter(self, model_id: str) -> None:
        """Free an adapter; unknown names are ignored."""

        def drop() -> None:
            served = self._served_by_adapter.pop(model_id, None)
            if served is not None:
                served.trainer.drop(model_id)

        await self._do(_once(drop), _model(model_id))

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations at once.

        A cancelled call ends after the current pass; each operation is then done or untouched.
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
            _count(served.counts, ops, found)
            answers.update(zip(places, found, strict=True))
        return [answers[place] for place in range(len(batch))]

    def _pass_tokens(self) -> int:
        """The size of the next training pass: smaller while samples wait for its end."""
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
    ) -> Iterator[tuple[ServedModel, list[int]]]:
        """Indices of the batch by base model; unknown adapters get their error in `answers`."""
        places: dict[str, list[int]] = {}
        for place, op in enumerate(batch):
            served = self._served_by_adapter.get(op.model_id)
            if served is None:
                answers[place] = user_error(f"model {op.model_id!r} is not loaded", op.op_id)
            else:
                places.setdefault(served.name, []).append(place)
        return ((self._served[name], found) for name, found in places.items())

    async def publish(self, model_id: str, snapshot: str) -> None:
        """Freeze an adapter as it is for sampling under the name `snapshot`."""

        def publish() -> None:
            served, before = self._of_adapter(model_id), self._served_by_snapshot.get(snapshot)
            weights = served.trainer.weights(model_id)
            served.versions.add(snapshot_name(snapshot), weights)
            if before is not None and before is not served:
                before.versions.retire(snapshot_name(snapshot))
            self._served_by_snapshot[snapshot] = served

        await self._do(_once(publish), _model(model_id), _snapshot(snapshot))

    async def save_snapshot(self, snapshot: str, location: str) -> SavedAdapter:
        """Write what was published; complete and durable when it returns."""

        def save() -> Steps:
            served = self._served_by_snapshot.get(snapshot)
            if served is None:
                raise user_error(f"snapshot {snapshot!r} is not published")
            return (yield from self._write(served.frozen(snapshot), location))

        return await self._do(save(), _snapshot(snapshot), _saved(location))

    async def drop_snapshot(self, snapshot: str) -> None:
        """Drop a snapshot; samples that use it keep it. Unknown names are ignored."""

        def drop() -> None:
            served = self._served_by_snapshot.pop(snapshot, None)
            if served is not None:
                served.versions.retire(snapshot_name(snapshot))

        await self._do(_once(drop), _snapshot(snapshot))

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        """Sample; cancelling the call frees its blocks."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SampleResult] = loop.create_future()
        weights = op.weights
        cancels: list[Callable[[], None]] = []

        def notify(outcome: object) -> None:
            call_on_loop(loop, lambda: _settle(answer, outcome))

        def submit() -> Steps:
            served = self._base(weights.base_model)
            version = served.version(weights)
            if version is None:
                assert weights.location is not None
                state = yield partial(self._read, weights.location, served)
                version = served.add_saved(weights.location, state)
            relayed = None if on_token is None else self._relay.to(loop, on_token)
            cancels.append(served.submit(op, version, relayed, notify))

        keys = [_snapshot(weights.snapshot)] if weights.snapshot is not None else []
        keys += [_saved(weights.location)] if weights.location is not None else []
        try:
            await self._do(submit(), *keys)
            result: SampleResult = await self._answer(answer)
        except asyncio.CancelledError:
            # The thread may be submitting the sample right now, so the cancellation is a task, too:
            # it runs after that, and finds the sample in `cancels`.
            with suppress(ClosedError):
                self._thread.post(_background(lambda: [cancel() for cancel in cancels]))
            raise
        return replace(result, version=weights.snapshot or weights.location or BASE)

    async def copy_saved(self, source: str, target: str) -> None:
        """Copy what was saved at one location to another."""

        def copy() -> Steps:
            with _naming(source):
                yield partial(self._files.copy, source, target)
            self._retire(target)

        await self._do(copy(), _saved(source), _saved(target))

    async def delete_saved(self, location: str) -> None:
        """Delete a saved adapter; samples that use it keep it until they end."""

        def delete() -> Steps:
            yield partial(self._files.delete, location)
            self._retire(location)

        await self._do(delete(), _saved(location))

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        """The two files of a saved adapter, by name."""

        def export() -> Steps:
            state = yield partial(self._read, location)
            return (yield partial(export_peft, state.weights, layout))

        return await self._do(export(), _saved(location))

    async def import_saved(self, base_model: str, folder: Path, location: str) -> ImportedAdapter:
        """Save the PEFT adapter in a folder of this machine; complete and durable at the end."""

        def imported() -> Steps:
            config = self._config(base_model)
            try:
                weights = yield partial(import_folder, folder, config)
            except InputError as error:
                raise user_error(str(error)) from error
            state = adapter_file.State(base_model=config.name, weights=weights)
            saved = yield from self._write(state, location)
            return ImportedAdapter(size_bytes=saved.size_bytes, lora=weights.lora)

        return await self._do(imported(), _saved(location))

    async def stats(self) -> Mapping[str, float]:
        """Gauges and counters; reads them from this thread, so it never waits for a pass."""
        held = {f"adapters_{name}": n for name, n in self._parking.counts()._asdict().items()}
        found = Counter({**dict.fromkeys(GAUGES, 0.0), **held})
        found["adapters_capacity_bytes"] = self._parking.device_bytes or 0
        for served in list(self._served.values()):
            found.update(served.stats())
        return dict(found)

    def _read(self, location: str, served: ServedModel | None = None) -> adapter_file.State:
        """The adapter saved at a location, for a base model; None is its own base model."""
        with _naming(location), self._files.open(location) as path:
            config = served.config if served else self._config(adapter_file.base_model_of(path))
            return adapter_file.load(path, config)

    def _config(self, name: str) -> DecoderConfig:
        deferred = self._deferred.get(name)
        return self._base(name).config if deferred is None else deferred.config

    def _base(self, name: str) -> ServedModel:
        """A base model, loaded on first use."""
        deferred = self._deferred.get(name)
        if deferred is not None:
            self._served[name] = self._serve(deferred.load())
            self._samplers.append(self._served[name])
            del self._deferred[name]
        served = self._served.get(name)
        if served is None:
            names = ", ".join(spec.name for spec in self._models)
            raise user_error(f"no base model {name!r} here; there are: {names}")
        return served

    def _of_adapter(self, model_id: str) -> ServedModel:
        served = self._served_by_adapter.get(model_id)
        if served is None:
            raise user_error(f"model {model_id!r} is not loaded")
        return served

    async def _do(self, steps: Steps, *keys: str, training: bool = False) -> Any:
        """Run steps on the engine's thread, in order with other tasks of these keys."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(outcome: object) -> None:
            call_on_loop(loop, lambda: _settle(answer, outcome))

        def wanted() -> bool:
            return not answer.cancelled()

        self._thread.post(
            EngineTask(
                steps=steps, settle=settle, keys=frozenset(keys), training=training, wanted=wanted
            )
        )
        return await self._answer(answer)

    async def _answer(self, answer: asyncio.Future[Any]) -> Any:
        """Wait for an answer; `close` fails it if it is still pending."""
        self._pending.add(answer)
        try:
            return await answer
        finally:
            self._pending.discard(answer)

    async def close(self) -> None:
        """End the thread after its current step; pending calls raise `ClosedError`."""
        # In this order: the thread uses the parking and the files until it has ended.
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self._parking.close)
        await asyncio.to_thread(self._files.close)

    def _end_all(self) -> None:
        error = ClosedError("the engine was closed")
        for answer in list(self._pending):
            call_on_loop(answer.get_loop(), partial(_settle, answer, error))

    async def __aenter__(self) -> LocalEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _count(
    counts: Counter[str],
    ops: Sequence[TrainOp],
    answers: Sequence[TrainResult | RequestFailedError],
) -> None:
    for op, answer in zip(ops, answers, strict=True):
        if isinstance(answer, TrainResult):
            kind = "tokens_trained_total" if op.backward else "tokens_scored_total"
            counts[kind] += answer.tokens


def _model(model_id: str) -> str:
    return f"model:{model_id}"


def _snapshot(snapshot: str) -> str:
    return f"snapshot:{snapshot}"


def _saved(location: str) -> str:
    return f"saved:{location}"


def _once(action: Callable[[], object]) -> Steps:
    """A task of one step."""
    return action()
    yield


def _background(action: Callable[[], object]) -> EngineTask:
    """A task whose result is ignored."""
    return EngineTask(steps=_once(action), settle=lambda _: None)


def _settle(answer: asyncio.Future[Any], outcome: object) -> None:
    if answer.done():  # cancelled, or failed by `close`
        return
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


@contextmanager
def _naming(location: str) -> Generator[None]:
    """Raise an error that names the location if there is no file."""
    try:
        yield
    except FileNotFoundError as error:
        raise user_error(f"nothing is saved at {location!r}") from error
