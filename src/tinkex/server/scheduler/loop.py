"""The scheduler's loop: decides what starts when, and runs batches of many models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import EngineDiedError, InputError, RequestFailedError, StorageError
from tinkex.server.scheduler.engine_access import EngineRestartedError
from tinkex.server.scheduler.jobs import died_under, stepped, trained
from tinkex.server.scheduler.plan import plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.server.scheduler.engine_access import EngineAccess
    from tinkex.server.scheduler.jobs import Done, Jobs
    from tinkex.server.scheduler.model_run import ModelRun
    from tinkex.server.scheduler.outcomes import Outcomes
    from tinkex.server.scheduler.plan import OperationBatch, Work
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.records import Operation

# The next batch waits so long for the snapshots of models that would be in it.
_SNAPSHOT_PATIENCE_S = 0.05

_log = logging.getLogger(__name__)


class SchedulerLoop:
    """Plans and starts work; `run` is its one long-lived task."""

    def __init__(
        self,
        runs: dict[str, ModelRun],
        clock: Clock,
        access: EngineAccess,
        jobs: Jobs,
        outcomes: Outcomes,
        settings: ServerSettings,
        arriving: Callable[[], Mapping[str, float]],
    ) -> None:
        self._runs = runs
        self._clock = clock
        self._access = access
        self._jobs = jobs
        self._outcomes = outcomes
        self._settings = settings
        self._arriving = arriving
        # Mutable state: the batch in which each owner had its last turn, whether the device runs a
        # batch, whether a queue waits for a request that is being read, whether nothing new is
        # started, and the event that wakes the loop.
        self._turns: dict[str, int] = {}
        self._device_busy = False
        self._held = False
        self._stopping = False
        self._changed = anyio.Event()

    def plan_again(self) -> None:
        """Wake the loop: something has changed."""
        self._changed.set()

    def arrived(self) -> None:
        """A request that was being read has arrived, or was refused."""
        if self._held:
            self.plan_again()

    async def run(self, group: TaskGroup) -> None:
        """Plan and start work until cancelled."""
        self._stopping, self._device_busy = False, False
        while True:
            # Replaced before planning, so that a change during it is planned next.
            self._changed = anyio.Event()
            wait_s = None if self._stopping else self._start(group)
            async with time_limit(self._clock, wait_s):
                await self._changed.wait()

    async def stop(self) -> None:
        """Start nothing new, and return when what runs has ended and the models are saved."""
        self._stopping = True
        while any(run.active for run in self._runs.values()):
            await self._changed.wait()
        for run in list(self._runs.values()):
            await run.save_changes()

    def _start(self, group: TaskGroup) -> float | None:
        """Start what can be; returns how long to wait if nothing happens before."""
        now = self._clock.now()
        for run in list(self._runs.values()):
            if run.over:
                del self._runs[run.model_id]
            elif run.queue.not_before <= now:
                if run.may_leave:
                    run.begin("leaving")
                    group.start_soon(_watched, run, run.drop)
                elif run.missing:
                    run.begin("restoring")
                    group.start_soon(_watched, run, run.restore)
        decided = plan(
            [run.queue for run in self._runs.values()],
            now,
            device_busy=self._device_busy,
            gap_timeout_s=self._settings.gap_timeout_s,
            max_batch_ops=self._settings.max_batch_ops,
            turns=self._turns,
            suspects=self._access,
            arriving=self._arriving(),
        )
        self._held = decided.held
        for batch in decided.batches:
            for model_id, operations in batch.runs:
                self._runs[model_id].take(operations)
            if batch.work != "control":
                self._device_busy = True
                self._count_turn(batch.operations)
            group.start_soon(self._run_batch, group, batch)
        wakes = [run.wakes_at for run in self._runs.values()]
        later = [at for at in (*wakes, decided.wake_at) if at is not None and at > now]
        return min(later) - now if later else None

    def _count_turn(self, operations: Sequence[Operation]) -> None:
        turn = max(self._turns.values(), default=0) + 1
        # Owners without operations in the last batches need no entry.
        self._turns = {owner: last for owner, last in self._turns.items() if last > turn - 1000}
        self._turns.update((op.owner, turn) for op in operations)

    async def _run_batch(self, group: TaskGroup, batch: OperationBatch) -> None:
        runs = [self._runs[model_id] for model_id, _ in batch.runs]
        try:
            await self._run(group, batch, runs)
        except Exception as error:  # noqa: BLE001 - the batch ends here, and not the server
            _log.exception("a batch ended with an unexpected error")
            for run in runs:
                run.failed(error)
        if batch.work != "control":
            self._device_busy = False
        self.plan_again()

    async def _run(self, group: TaskGroup, batch: OperationBatch, runs: Sequence[ModelRun]) -> None:
        again, error = await self._execute(batch, runs)
        if again and self._access.hopeless:
            error = error or EngineDiedError("there is no engine")
        written: list[anyio.Event] = []
        for run, (_, operations) in zip(runs, batch.runs, strict=True):
            left = [op for op in again if op.model_id == run.model_id]
            if run.ran(operations[-1].seq_id, left, error):
                written.append(anyio.Event())
                group.start_soon(_snapshot, run, written[-1])
        if batch.work != "control":
            # With these models the next batch is larger, but it must not wait for a slow disk.
            async with time_limit(self._clock, _SNAPSHOT_PATIENCE_S if written else None):
                for done in written:
                    await done.wait()

    async def _execute(
        self, batch: OperationBatch, runs: Sequence[ModelRun]
    ) -> tuple[Sequence[Operation], Exception | None]:
        """Run operations; returns those that have to run again, and why only after a while."""
        operations, now = batch.operations, self._clock.wall()
        started = [replace(op, state="running", started_at=now) for op in operations]
        ended: set[str] = set()
        try:
            await self._outcomes.start([op.op_id for op in started], now)
            results = await self._results(batch.work, runs, started)
            await self._settle(runs, started, results, ended)
        except EngineRestartedError:
            return operations, None
        except EngineDiedError:
            return await self._blamed(operations), None
        except StorageError as error:
            return operations, error
        except Exception as error:  # noqa: BLE001 - the batch ends here; what is left runs again
            _log.exception("a batch ended with an unexpected error")
            for run in runs:
                run.evict()
            return [op for op in operations if op.op_id not in ended], error
        return (), None

    async def _results(
        self, work: Work, runs: Sequence[ModelRun], operations: Sequence[Operation]
    ) -> list[Done | Exception]:
        if work == "control":
            return [await run.control(op) for run, op in zip(runs, operations, strict=True)]
        jobs = [await self._job(work, op) for op in operations]
        good = [job for job in jobs if not isinstance(job, Exception)]
        answers: Iterator[Any] = iter(())
        async with self._access.running([op.op_id for op in operations]):
            epoch = await self._access.ready()
            if not all(run.in_engine for run in runs):
                raise EngineRestartedError("the engine was started again")
            if good:
                engine = self._access.engine
                call = engine.train(good) if work == "train" else engine.optim_step(good)
                try:
                    answers = iter(await self._access.guard(epoch, call))
                except (EngineDiedError, EngineRestartedError):
                    raise
                except Exception as error:
                    # After a failure of the whole batch it is unknown which models have changed.
                    for run in runs:
                        run.evict()
                    if isinstance(error, StorageError):
                        raise
                    answers = iter([error] * len(good))
        results = [job if isinstance(job, Exception) else next(answers) for job in jobs]
        return [_done(op, r) for op, r in zip(operations, results, strict=True)]

    async def _job(self, work: Work, op: Operation) -> Any:
        try:
            return await self._jobs.train_op(op) if work == "train" else self._jobs.optim_op(op)
        except (RequestFailedError, InputError) as error:
            return error

    async def _settle(
        self,
        runs: Sequence[ModelRun],
        operations: Sequence[Operation],
        results: Sequence[Done | Exception],
        ended: set[str],
    ) -> None:
        """Record each model's outcomes in order: a crash in between must leave no gap."""
        by_model: dict[str, list[tuple[Operation, Done | Exception]]] = {}
        for op, result in zip(operations, results, strict=True):
            by_model.setdefault(cast("str", op.model_id), []).append((op, result))

        async def settle(run: ModelRun) -> None:
            for op, result in by_model[run.model_id]:
                await run.settle(op, result)
                ended.add(op.op_id)

        async with anyio.create_task_group() as group:
            for run in runs:
                group.start_soon(settle, run)

    async def _blamed(self, operations: Sequence[Operation]) -> list[Operation]:
        """Count a death against everything that ran; returns what is tried again."""
        again: list[Operation] = []
        for op in operations:
            if self._access.blame(op.op_id):
                outcome = self._outcomes.settled(op, died_under(op))
                await self._outcomes.finish(op, outcome)
                self._access.clear([op.op_id])
            else:
                again.append(op)
        return again


async def _snapshot(run: ModelRun, done: anyio.Event) -> None:
    await _watched(run, run.snapshot)
    done.set()


async def _watched(run: ModelRun, activity: Callable[[], Awaitable[None]]) -> None:
    """Run an activity of one model; an unexpected error ends it, and not the server."""
    try:
        await activity()
    except Exception as error:  # noqa: BLE001 - the activity ends here
        _log.exception("an activity of %s ended with an unexpected error", run.model_id)
        run.failed(error)


def _done(op: Operation, result: Any) -> Done | Exception:
    if isinstance(result, Exception):
        return result
    return stepped(result) if op.kind == "optim_step" else trained(op, result)
