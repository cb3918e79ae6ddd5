"""The loop that plans, runs the engine and stores results.

The worker owns the lanes, in which every model's operations wait for their turn, and the
samples in flight. Every accepted operation ends with an outcome in the store.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import InputError, RequestFailedError
from tinkex.server.scheduler.jobs import Done, Jobs, stepped, trained
from tinkex.server.scheduler.plan import Lane, Waiting, plan
from tinkex.server.store.records import Outcome, UsageEntry
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.engine.base import Engine
    from tinkex.server.scheduler.plan import Batch
    from tinkex.server.scheduler.waiters import Waiters
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation, OpKind

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CANCELLED = Outcome(error="The operation was cancelled.", category="user")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an unfinished operation stands: how many go first, and since when."""

    state: Literal["queued", "running"]
    position: int
    since: float


class Worker:
    """Runs accepted operations; `run()` is its one long-lived task."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        clock: Clock,
        waiters: Waiters,
        *,
        encode: Callable[[OpKind, object], bytes],
        gap_timeout_s: float,
        max_batch_ops: int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._waiters = waiters
        self._engine = engine
        self._encode = encode
        self._gap_timeout_s = gap_timeout_s
        self._max_batch_ops = max_batch_ops
        self.jobs = Jobs(store, engine, clock)
        # Mutable state: the lanes, the samples to start and in flight, models to drop when
        # their lane is empty, whether the device runs a batch, and the loop's wake-up.
        self._lanes: dict[str, Lane] = {}
        self._new_samples: list[Operation] = []
        self._samples: dict[str, anyio.CancelScope] = {}
        self._leaving: set[str] = set()
        self._failed_models: dict[str, RequestFailedError] = {}
        self._device_busy = False
        self._bell = anyio.Event()

    @property
    def samples_in_flight(self) -> int:
        """Samples accepted and not finished."""
        return len(self._new_samples) + len(self._samples)

    async def run(self) -> None:
        """Plan and start work until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                # Before planning, so that what arrives meanwhile is planned next.
                self._bell = anyio.Event()
                self._start_samples(group)
                now = self._clock.now()
                decided = plan(
                    self._lanes.values(),
                    now,
                    device_busy=self._device_busy,
                    gap_timeout_s=self._gap_timeout_s,
                    max_batch_ops=self._max_batch_ops,
                )
                for batch in decided.batches:
                    self._start_batch(group, batch)
                wait_s = None if decided.wake_at is None else decided.wake_at - now
                async with time_limit(self._clock, wait_s):
                    await self._bell.wait()

    async def submit(self, operation: Operation) -> Operation:
        """Accept an operation, or find the one that was accepted under its id."""
        accepted, new = await self._store.submit(operation)
        if new:
            if operation.kind == "sample":
                self._new_samples.append(accepted)
            else:
                await self._enqueue(accepted)
            self._bell.set()
        return accepted

    async def submit_done(self, operation: Operation, value: object) -> Operation:
        """Accept an operation that needed no waiting; its result is there at once."""
        accepted, new = await self._store.submit(operation)
        if new:
            await self._finish(accepted, self._settled(accepted, Done(value, Usage())))
        return accepted

    def next_seq(self, model_id: str) -> int:
        """The turn of a request whose client does not number its requests."""
        lane = self._lanes.get(model_id)
        return 0 if lane is None else lane.last_seq + 1

    async def cancel(self, operation: Operation) -> bool:
        """Withdraw an operation; False when it ran already or cannot be stopped."""
        scope = self._samples.get(operation.op_id)
        lane = self._lanes.get(operation.model_id or "")
        waiting = lane.waiting.get(operation.seq_id) if lane is not None else None
        if operation.kind == "sample":
            self._new_samples = [o for o in self._new_samples if o.op_id != operation.op_id]
        elif lane is None or waiting is None or waiting.op_id != operation.op_id:
            return False
        else:
            del lane.waiting[operation.seq_id]
            lane.void.add(operation.seq_id)
            self._bell.set()
        cancelled = await self._finish(operation, _CANCELLED)
        if scope is not None:
            scope.cancel()
        return cancelled

    async def end_session(self, session_id: str) -> None:
        """Free what a session held: samples at once, models when their operations have run."""
        for operation in await self._store.operations(session_id):
            if operation.kind == "sample" and operation.state != "done":
                await self.cancel(operation)
        for sampler in await self._store.samplers(session_id):
            if sampler.snapshot is not None:
                await _quietly(self._engine.drop_snapshot(sampler.snapshot))
        for model in await self._store.models(session_id=session_id):
            self._leaving.add(model.model_id)
            await self._leave_if_empty(model.model_id)

    async def progress(self, operation: Operation) -> Progress:
        """How far an unfinished operation is."""
        if operation.state == "running" and operation.started_at is not None:
            return Progress("running", 0, operation.started_at)
        ahead = sum(
            other.arrived_at < operation.created_at
            or (other.arrived_at == operation.created_at and other.seq_id < operation.seq_id)
            for lane in self._lanes.values()
            for other in lane.waiting.values()
            if other.op_id != operation.op_id
        )
        return Progress("queued", 0 if operation.kind == "sample" else ahead, operation.created_at)

    def forget_samples(self) -> None:
        """Drop every sample in flight without an outcome, as a restart does."""
        self._new_samples.clear()
        scopes = list(self._samples.values())
        self._samples.clear()
        for scope in scopes:
            scope.cancel()

    async def _enqueue(self, op: Operation) -> None:
        model_id = cast("str", op.model_id)
        lane = self._lanes.setdefault(model_id, Lane(model_id))
        if op.seq_id < lane.next_seq:
            late = (
                f"request {op.seq_id} of {model_id} came after its turn: request "
                f"{lane.next_seq - 1} has already run"
            )
            await self._finish(op, Outcome(error=late, category="server"))
            return
        lane.waiting[op.seq_id] = Waiting(op.op_id, op.seq_id, op.kind, op.owner, op.created_at)
        lane.last_seq = max(lane.last_seq, op.seq_id)
        lane.last_arrival = self._clock.now()

    def _start_samples(self, group: TaskGroup) -> None:
        for operation in self._new_samples:
            scope = self._samples[operation.op_id] = anyio.CancelScope()
            group.start_soon(self._run_sample, operation, scope)
        self._new_samples.clear()

    def _start_batch(self, group: TaskGroup, batch: Batch) -> None:
        for model_id, run in batch.runs:
            lane = self._lanes[model_id]
            lane.busy = True
            for waiting in run:
                del lane.waiting[waiting.seq_id]
        self._device_busy = self._device_busy or batch.work != "control"
        group.start_soon(self._run_batch, batch)

    async def _run_sample(self, operation: Operation, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await self._store.start([operation.op_id], self._clock.wall())
                outcome = await self._outcome(operation, self.jobs.sample(operation))
                await self._finish(operation, outcome)
            finally:
                # After a restart the same id may already belong to the sample sent again.
                if self._samples.get(operation.op_id) is scope:
                    del self._samples[operation.op_id]

    async def _run_batch(self, batch: Batch) -> None:
        try:
            operations = await self._operations(batch.op_ids)
            await self._store.start(batch.op_ids, self._clock.wall())
            alive = [op for op in operations if not await self._finish_if_modelless(op)]
            if batch.work == "control":
                for op in alive:
                    await self._run_control(op)
            else:
                await self._run_device(batch, alive)
        finally:
            self._device_busy = self._device_busy and batch.work == "control"
            for model_id, run in batch.runs:
                lane = self._lanes[model_id]
                lane.busy = False
                lane.next_seq = max(lane.next_seq, run[-1].seq_id + 1)
                lane.void = {seq for seq in lane.void if seq >= lane.next_seq}
            self._bell.set()
        for model_id, _ in batch.runs:
            await self._leave_if_empty(model_id)

    async def _run_control(self, op: Operation) -> None:
        outcome = await self._outcome(op, self.jobs.control(op))
        creates = op.kind == "create_model" or op.seq_id == 0
        if outcome.error is not None and creates:
            reason = f"the model was not created: {outcome.error}"
            self._failed_models[cast("str", op.model_id)] = RequestFailedError(
                reason, None, outcome.category
            )
        await self._finish(op, outcome)

    async def _run_device(self, batch: Batch, operations: Sequence[Operation]) -> None:
        run = self._train if batch.work == "train" else self._optim_step
        try:
            results = await run(operations)
        except Exception as error:  # noqa: BLE001  # a batch ends here; its failure is recorded
            for op in operations:
                await self._finish(op, _failed(op, error))
            return
        for op, result in zip(operations, results, strict=True):
            await self._finish(op, self._settled(op, result))

    async def _train(self, operations: Sequence[Operation]) -> list[Done | RequestFailedError]:
        jobs = [await _attempt(self.jobs.train_op(op)) for op in operations]
        good = [job for job in jobs if not isinstance(job, RequestFailedError)]
        answers = iter(await self._engine.train(good) if good else ())
        results = [job if isinstance(job, RequestFailedError) else next(answers) for job in jobs]
        return [
            r if isinstance(r, RequestFailedError) else trained(op, r)
            for op, r in zip(operations, results, strict=True)
        ]

    async def _optim_step(self, operations: Sequence[Operation]) -> list[Done | RequestFailedError]:
        jobs = [await _attempt(self.jobs.optim_op(op)) for op in operations]
        good = [job for job in jobs if not isinstance(job, RequestFailedError)]
        answers = iter(await self._engine.optim_step(good) if good else ())
        results = [job if isinstance(job, RequestFailedError) else next(answers) for job in jobs]
        return [r if isinstance(r, RequestFailedError) else stepped(r) for r in results]

    async def _outcome(self, op: Operation, job: Coroutine[Any, Any, Done]) -> Outcome:
        try:
            return self._settled(op, await job)
        except Exception as error:  # noqa: BLE001 - a job ends here; its failure is recorded
            return _failed(op, error)

    def _settled(self, op: Operation, result: Done | RequestFailedError) -> Outcome:
        if isinstance(result, RequestFailedError):
            return _failed(op, result)
        try:
            body = self._encode(op.kind, result.value)
        except Exception as error:  # noqa: BLE001 - a result nobody can be told is a failure
            return _failed(op, error)
        return Outcome(body=body, size_bytes=len(body), usage=result.usage)

    async def _finish(self, op: Operation, outcome: Outcome) -> bool:
        now = self._clock.wall()
        started = await self._store.get_operation(op.op_id)
        if started is not None and started.started_at is not None:
            queue_s = started.started_at - op.created_at
            outcome = replace(outcome, usage=_with_queue(outcome.usage, queue_s))
        first = await self._store.finish(op.op_id, outcome, now)
        if first:
            await self._account(op, outcome, now)
            self._waiters.ring(op.op_id)
            if op.sampler_id is not None:
                self._waiters.ring((op.sampler_id, op.clone))
        return first

    async def _account(self, op: Operation, outcome: Outcome, now: float) -> None:
        if outcome.error is not None:
            return
        source = (
            await self._store.get_sampler(op.sampler_id)
            if op.sampler_id is not None
            else await self._store.get_model(op.model_id or "")
        )
        session = await self._store.get_session(op.session_id)
        await self._store.add_usage(
            UsageEntry(
                at=now,
                owner=op.owner,
                session_id=op.session_id,
                base_model=None if source is None else source.base_model,
                project_id=None if session is None else session.project_id,
                kind=op.kind,
                usage=outcome.usage,
            )
        )

    async def _finish_if_modelless(self, op: Operation) -> bool:
        error = self._failed_models.get(op.model_id or "")
        if error is None or op.seq_id == 0:
            return False
        await self._finish(op, _failed(op, error))
        return True

    async def _operations(self, op_ids: Sequence[str]) -> list[Operation]:
        found = [await self._store.get_operation(op_id) for op_id in op_ids]
        return [op for op in found if op is not None]

    async def _leave_if_empty(self, model_id: str) -> None:
        lane = self._lanes.get(model_id)
        if model_id in self._leaving and (lane is None or not (lane.busy or lane.waiting)):
            self._leaving.discard(model_id)
            self._lanes.pop(model_id, None)
            self._failed_models.pop(model_id, None)
            await _quietly(self._engine.drop_adapter(model_id))


async def _quietly(cleanup: Awaitable[None]) -> None:
    """Freeing something may fail without anybody having to know but the log."""
    try:
        await cleanup
    except Exception:  # noqa: BLE001 - the clean-up ends here
        _log.exception("clean-up failed")


async def _attempt(job: Awaitable[T]) -> T | RequestFailedError:
    try:
        return await job
    except RequestFailedError as error:
        return error


def _failed(op: Operation, error: Exception) -> Outcome:
    if isinstance(error, RequestFailedError):
        return Outcome(error=error.message, category=error.category)
    if isinstance(error, InputError):
        return Outcome(error=str(error), category="user")
    _log.error("operation %s (%s) failed", op.op_id, op.kind, exc_info=error)
    return Outcome(error=f"{type(error).__name__}: {error}", category="server")


def _with_queue(usage: Usage, queue_s: float) -> Usage:
    return usage + Usage(queue_s=max(queue_s, 0.0))
