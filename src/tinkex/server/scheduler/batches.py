"""Running the operations of a batch, to the outcome of each or back into the queue.

An operation ends when its outcome is stored. The ones that did not come back for another try:
the engine died under them, or the storage fails.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import anyio

from tinkex.errors import EngineDiedError, InputError, RequestFailedError, StorageError
from tinkex.server.scheduler.jobs import stepped, trained
from tinkex.server.scheduler.residents import EngineRestartedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinkex.clock import Clock
    from tinkex.server.scheduler.control import Control
    from tinkex.server.scheduler.finishing import Finishing
    from tinkex.server.scheduler.jobs import Done, Jobs
    from tinkex.server.scheduler.plan import Work
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Residents
    from tinkex.server.scheduler.snapshots import Snapshots
    from tinkex.server.scheduler.suspects import Suspects
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation

_log = logging.getLogger(__name__)


def died_under(op: Operation) -> RequestFailedError:
    """What is said of an operation that is not tried again."""
    return RequestFailedError(
        "the engine died each time this operation ran, so it is not tried again; it may need more "
        "memory than there is",
        op.op_id,
        "server",
    )


class Batches:
    """Runs one batch per call; holds nothing but what it was given."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        jobs: Jobs,
        control: Control,
        residents: Residents,
        suspects: Suspects,
        published: Published,
        snapshots: Snapshots,
        finishing: Finishing,
    ) -> None:
        self._store = store
        self._clock = clock
        self._jobs = jobs
        self._control = control
        self._residents = residents
        self._suspects = suspects
        self._published = published
        self._snapshots = snapshots
        self._finishing = finishing

    async def run(self, work: Work, operations: Sequence[Operation]) -> list[Operation]:
        """Run operations; returns those that have to be run again.

        Raises StorageError when that makes sense only after a while: then all of them.
        """
        now = self._clock.wall()
        started = [replace(op, state="running", started_at=now) for op in operations]
        await self._finishing.start([op.op_id for op in started], now)
        async with self._suspects.running([op.op_id for op in started]):
            try:
                results = await self._results(work, started)
            except EngineRestartedError:
                return list(operations)
            except EngineDiedError:
                return await self._blamed(operations)
        await self._finish(started, results)
        return []

    async def _results(self, work: Work, operations: Sequence[Operation]) -> list[Done | Exception]:
        try:
            if work == "control":
                return [await self._control.run(op) for op in operations]
            return await self._device(work, operations)
        except (EngineDiedError, EngineRestartedError, StorageError):
            raise
        except (RequestFailedError, InputError) as error:
            return [error] * len(operations)
        except Exception as error:  # noqa: BLE001 - a batch ends here; its failure is recorded
            # Nobody knows what it did: the models come back as they were before.
            for op in operations:
                self._residents.remove_model(cast("str", op.model_id))
            return [error] * len(operations)

    async def _device(self, work: Work, operations: Sequence[Operation]) -> list[Done | Exception]:
        generation = await self._residents.ready()
        if not all(self._residents.has_model(cast("str", op.model_id)) for op in operations):
            raise EngineRestartedError("the engine was started again")
        jobs = [await self._job(work, op) for op in operations]
        good = [job for job in jobs if not isinstance(job, Exception)]
        answers: Iterator[Any] = iter(())
        if good:
            engine = self._residents.engine
            call = engine.train(good) if work == "train" else engine.optim_step(good)
            answers = iter(await self._residents.guard(generation, call))
        results = [job if isinstance(job, Exception) else next(answers) for job in jobs]
        return [_done(op, r) for op, r in zip(operations, results, strict=True)]

    async def _job(self, work: Work, op: Operation) -> Any:
        try:
            return await self._jobs.train_op(op) if work == "train" else self._jobs.optim_op(op)
        except (RequestFailedError, InputError) as error:
            return error

    async def _finish(
        self, operations: Sequence[Operation], results: Sequence[Done | Exception]
    ) -> None:
        """Each model's outcomes in order, because a crash in between must leave no hole."""
        by_model: dict[str, list[tuple[Operation, Done | Exception]]] = {}
        for op, result in zip(operations, results, strict=True):
            by_model.setdefault(cast("str", op.model_id), []).append((op, result))
        async with anyio.create_task_group() as group:
            for ended in by_model.values():
                group.start_soon(self._finish_lane, ended)

    async def _finish_lane(self, ended: Sequence[tuple[Operation, Done | Exception]]) -> None:
        for op, result in ended:
            outcome = self._finishing.settled(op, result)
            await self._finishing.finish(op, outcome)
            self._suspects.clear(op.op_id)
            if outcome.error is None:
                self._snapshots.note(op)
                await self._keep_published(cast("Done", result).value)

    async def _keep_published(self, value: object) -> None:
        sampler_id = getattr(value, "sampling_session_id", None)
        sampler = await self._store.get_sampler(sampler_id) if sampler_id is not None else None
        if sampler is not None:
            self._published.keep(sampler)

    async def _blamed(self, operations: Sequence[Operation]) -> list[Operation]:
        again: list[Operation] = []
        for op in operations:
            if self._suspects.blame(op.op_id):
                await self._finishing.finish(op, self._finishing.settled(op, died_under(op)))
                self._suspects.clear(op.op_id)
            else:
                again.append(op)
        return again


def _done(op: Operation, result: Any) -> Done | Exception:
    if isinstance(result, Exception):
        return result
    return stepped(result) if op.kind == "optim_step" else trained(op, result)
