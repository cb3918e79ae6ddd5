"""The scheduler's loop: decides what starts when, and runs batches of many models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import EngineDiedError, StorageError
from tinkex.server.scheduler.engine_access import EngineRestartedError
from tinkex.server.scheduler.jobs import died_under, stepped, trained
from tinkex.server.scheduler.plan import plan
from tinkex.server.store.records import changed
from tinkex.server.supervision import no_stray_cancellation, quietly

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.server.scheduler.engine_access import EngineAccess
    from tinkex.server.scheduler.jobs import Done, Jobs
    from tinkex.server.scheduler.model_run import ModelRun
    from tinkex.server.scheduler.outcomes import Outcomes
    from tinkex.server.scheduler.plan import OperationBatch, Queue, SchedulePlan, Work
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.records import Operation

# The next batch waits so long for the snapshots of models that would be in it.
_SNAPSHOT_PATIENCE_S = 0.05
# So many models of ended sessions are dropped at a time: the engine is shared with other tenants.
_MOST_LEAVING = 16

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
        # Mutable state: the runs that may have something to do, so that thousands of idle models
        # cost nothing, and how many were looked at so far; the runs that wait to leave, and how
        # many leave now.
        self._attended: dict[str, ModelRun] = {}
        self.looks = 0
        self._to_leave: dict[str, ModelRun] = {}
        self._leaving = 0
        # Mutable state: the batch in which each owner had its last turn, whether the device runs a
        # batch, whether a queue waits for a request that is being read, whether nothing new is
        # started, and the event that wakes the loop.
        self._turns: dict[str, int] = {}
        self._device_busy = False
        self._held = False
        self._stopping = False
        self._changed = anyio.Event()

    @property
    def queues(self) -> Iterator[Queue]:
        """The queues in which operations wait."""
        return (run.queue for run in self._attended.values() if run.queue.waiting)

    def attend(self, run: ModelRun) -> None:
        """Wake the loop: something of a model has changed."""
        self._attended[run.model_id] = run
        self.plan_again()

    def forget(self) -> None:
        """Forget all runs, as a restart does."""
        self._attended.clear()
        self._to_leave.clear()

    def plan_again(self) -> None:
        """Wake the loop: something has changed."""
        self._changed.set()

    def arrived(self) -> None:
        """A request that was being read has arrived, or was refused."""
        if self._held:
            self.plan_again()

    async def run(self, group: TaskGroup) -> None:
        """Plan and start work until cancelled."""
        self._stopping, self._device_busy, self._leaving = False, False, 0
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

    async def at_rest(self, run: ModelRun) -> None:
        """Return when nothing runs for a model."""
        while run.active:
            await self._changed.wait()

    def remove(self, run: ModelRun) -> None:
        """Forget a run that another node takes over."""
        self._attended.pop(run.model_id, None)
        self._to_leave.pop(run.model_id, None)
        if self._runs.get(run.model_id) is run:
            del self._runs[run.model_id]

    def _start(self, group: TaskGroup) -> float | None:
        """Start what can be; returns how long to wait if nothing happens before."""
        now = self._clock.now()
        for run in list(self._attended.values()):
            self.looks += 1
            try:
                self._look_at(group, run, now)
            except Exception as error:  # noqa: BLE001 - one model rests, the others continue
                _log.exception("%s cannot be planned", run.model_id)
                run.failed(error)
        self._drop_some(group, now)
        decided = self._plan(now)
        self._held = decided.held
        for batch in decided.batches:
            runs = [self._attended[model_id] for model_id, _ in batch.runs]
            for run, (_, operations) in zip(runs, batch.runs, strict=True):
                run.take(operations)
            if batch.work != "control":
                self._device_busy = True
                self._count_turn(batch.operations)
            group.start_soon(self._run_batch, group, batch, runs)
        wakes = [run.wakes_at for run in self._attended.values() if not run.held]
        later = [at for at in (*wakes, decided.wake_at) if at is not None and at > now]
        return min(later) - now if later else None

    def _look_at(self, group: TaskGroup, run: ModelRun, now: float) -> None:
        """Start what one model needs besides its operations."""
        if run.over:
            del self._attended[run.model_id]
            if self._runs.get(run.model_id) is run:
                del self._runs[run.model_id]
        elif run.idle:
            del self._attended[run.model_id]
        elif run.queue.not_before <= now and not run.held:
            if run.may_leave:
                self._to_leave[run.model_id] = self._attended.pop(run.model_id)
            elif run.missing:
                run.begin("restoring")
                group.start_soon(_watched, run, run.restore)

    def _drop_some(self, group: TaskGroup, now: float) -> None:
        while self._to_leave and self._leaving < _MOST_LEAVING:
            run = self._to_leave.pop(next(iter(self._to_leave)))
            # Something may have arrived for it meanwhile.
            if run.held:
                self._attended[run.model_id] = run
            elif run.may_leave and run.queue.not_before <= now:
                run.begin("leaving")
                self._leaving += 1
                group.start_soon(self._drop, run)

    async def _drop(self, run: ModelRun) -> None:
        await _watched(run, run.drop)
        self._leaving -= 1
        self.plan_again()

    def _plan(self, now: float) -> SchedulePlan:
        def planned(queues: Sequence[Queue]) -> SchedulePlan:
            return plan(
                queues,
                now,
                device_busy=self._device_busy,
                gap_timeout_s=self._settings.gap_timeout_s,
                max_batch_ops=self._settings.max_batch_ops,
                turns=self._turns,
                suspects=self._access,
                arriving=self._arriving(),
            )

        try:
            return planned(list(self.queues))
        except Exception:  # noqa: BLE001 - one queue causes it, the others continue
            _log.exception("not every queue can be planned")
        good: list[Queue] = []
        for queue in list(self.queues):
            try:
                planned([queue])
                good.append(queue)
            except Exception as error:  # noqa: BLE001 - looked at again when it changes
                self._attended.pop(queue.model_id).rest(error)
        return planned(good)

    def _count_turn(self, operations: Sequence[Operation]) -> None:
        turn = max(self._turns.values(), default=0) + 1
        # Owners without operations in the last batches need no entry.
        self._turns = {owner: last for owner, last in self._turns.items() if last > turn - 1000}
        self._turns.update((op.owner, turn) for op in operations)

    async def _run_batch(
        self, group: TaskGroup, batch: OperationBatch, runs: Sequence[ModelRun]
    ) -> None:
        try:
            with no_stray_cancellation():
                await self._run(group, batch, runs)
        except Exception as error:  # noqa: BLE001 - the batch ends here, and not the server
            _log.exception("a batch ended with an unexpected error")
            for run, (_, operations) in zip(runs, batch.runs, strict=True):
                run.failed(error, self._unfinished(operations))
        if batch.work != "control":
            self._device_busy = False
        self.plan_again()

    async def _run(self, group: TaskGroup, batch: OperationBatch, runs: Sequence[ModelRun]) -> None:
        errors = await self._execute(batch, runs)
        written: list[anyio.Event] = []
        for run, (_, operations) in zip(runs, batch.runs, strict=True):
            # What has no outcome runs again.
            left, error = self._unfinished(operations), errors.get(run.model_id)
            if left and error is None and self._access.hopeless:
                error = EngineDiedError("there is no engine")
            if run.ran(operations[-1].seq_id, left, error):
                written.append(anyio.Event())
                group.start_soon(_snapshot, run, written[-1])
        if batch.work != "control":
            # With these models the next batch is larger, but it must not wait for a slow disk.
            async with time_limit(self._clock, _SNAPSHOT_PATIENCE_S if written else None):
                for done in written:
                    await done.wait()

    def _unfinished(self, operations: Sequence[Operation]) -> list[Operation]:
        return [op for op in operations if self._outcomes.is_unfinished(op)]

    async def _execute(
        self, batch: OperationBatch, runs: Sequence[ModelRun]
    ) -> Mapping[str, Exception]:
        """Run operations; returns by model why what is left of it runs only after a while."""
        operations, now = batch.operations, self._clock.wall()
        started = [changed(op, state="running", started_at=now) for op in operations]
        try:
            with no_stray_cancellation():
                await self._outcomes.start([op.op_id for op in started], now)
                results = await self._results(batch.work, runs, started)
        except EngineRestartedError:
            return {}
        except EngineDiedError:
            await self._blame(operations)
            return {}
        except Exception as error:  # noqa: BLE001 - the batch ends here; what is left runs again
            if not isinstance(error, StorageError):
                _log.exception("a batch ended with an unexpected error")
                for run in runs:
                    run.evict()
                await self._blame(operations, error)
            return {run.model_id: error for run in runs}
        return await self._settle(runs, started, results)

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
                    if isinstance(error, StorageError) or len(good) > 1:
                        raise
                    answers = iter([error])
        results = [job if isinstance(job, Exception) else next(answers) for job in jobs]
        return [_done(op, r) for op, r in zip(operations, results, strict=True)]

    async def _job(self, work: Work, op: Operation) -> Any:
        try:
            with no_stray_cancellation():
                return await self._jobs.train_op(op) if work == "train" else self._jobs.optim_op(op)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - one operation ends here, the others run
            return error

    async def _settle(
        self,
        runs: Sequence[ModelRun],
        operations: Sequence[Operation],
        results: Sequence[Done | Exception],
    ) -> Mapping[str, Exception]:
        """Record each model's outcomes in order: a crash in between must leave no gap.

        Returns by model why that has failed.
        """
        by_model: dict[str, list[tuple[Operation, Done | Exception]]] = {}
        for op, result in zip(operations, results, strict=True):
            by_model.setdefault(cast("str", op.model_id), []).append((op, result))
        failed: dict[str, Exception] = {}

        async def settle(run: ModelRun) -> None:
            for op, result in by_model[run.model_id]:
                try:
                    with no_stray_cancellation():
                        await run.settle(op, result)
                except Exception as error:  # noqa: BLE001 - one model ends here, the others continue
                    _log.exception("the outcome of %s cannot be recorded", op.op_id)
                    failed[run.model_id] = error
                    run.evict()
                    await self._blame([op], error)
                    return

        async with anyio.create_task_group() as group:
            for run in runs:
                group.start_soon(settle, run)
        return failed

    async def _blame(self, operations: Sequence[Operation], error: Exception | None = None) -> None:
        """Count a death or another failure against all that ran; what has seen too many fails."""
        for op in self._unfinished(operations):
            if self._access.blame(op.op_id):
                outcome = self._outcomes.settled(op, error or died_under(op))
                if await quietly(self._outcomes.finish(op, outcome), f"giving up {op.op_id}"):
                    self._access.clear([op.op_id])


async def _snapshot(run: ModelRun, done: anyio.Event) -> None:
    await _watched(run, run.snapshot)
    done.set()


async def _watched(run: ModelRun, activity: Callable[[], Awaitable[None]]) -> None:
    """Run an activity of one model; an unexpected error ends it, and not the server."""
    try:
        with no_stray_cancellation():
            await activity()
    except Exception as error:  # noqa: BLE001 - the activity ends here
        _log.exception("an activity of %s ended with an unexpected error", run.model_id)
        run.failed(error)


def _done(op: Operation, result: Any) -> Done | Exception:
    if isinstance(result, Exception):
        return result
    return stepped(result) if op.kind == "optim_step" else trained(op, result)
