"""Bringing a model back into an engine that does not have it.

A model is its last snapshot and the operations after it. They are run again in their order;
training is deterministic, so the bits are those that the clients were told about, and the
results are dropped.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING, cast

from tinkex.errors import RequestFailedError
from tinkex.server.scheduler.checks import failure
from tinkex.server.scheduler.jobs import spec_of
from tinkex.server.scheduler.snapshots import CHANGING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinkex.engine.base import OptimResult, TrainResult
    from tinkex.server.scheduler.jobs import Jobs
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Generation, Residents
    from tinkex.server.scheduler.snapshots import Snapshots
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Model, Operation

_PUBLISH = "save_weights_for_sampler"

_log = logging.getLogger(__name__)


def is_closed(model: Model) -> bool:
    """Whether a model was unloaded or its session is over: there is nothing to come back to."""
    return model.snapshot_seq >= 0 and model.snapshot_location is None


class Recovery:
    """Restores models; whoever calls it keeps everybody else off the model meanwhile."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        residents: Residents,
        published: Published,
        snapshots: Snapshots,
        max_batch_ops: int,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._residents = residents
        self._published = published
        self._snapshots = snapshots
        self._max_batch_ops = max_batch_ops

    async def restore(self, model_id: str) -> None:
        """Make the engine's model what its clients know it to be.

        Raises RequestFailedError when there is no such model any more.
        """
        generation = await self._residents.ready()
        model = await self._store.get_model(model_id)
        if model is None:
            raise failure(f"there is no model {model_id!r}")
        if is_closed(model):
            raise failure(f"model {model_id!r} was unloaded; create another one")
        journal = await self._store.journal(model_id, model.snapshot_seq)
        done = [op for op in journal if op.state == "done"]
        _check_created(model, done)
        await self._begin(model, generation)
        await self._replay(model, _successes(done), generation)
        self._snapshots.restored(model_id, done)
        self._residents.add_model(model_id, generation)
        _log.info("restored model %s from %d operations", model_id, len(done))

    async def _begin(self, model: Model, generation: Generation) -> None:
        engine, guard = self._residents.engine, self._residents.guard
        # Something half restored may be there.
        await guard(generation, engine.drop_adapter(model.model_id))
        if model.snapshot_location is not None:
            await guard(generation, engine.create_adapter(spec_of(model)))
            load = engine.load_adapter(model.model_id, model.snapshot_location, optimizer=True)
            await guard(generation, load)

    async def _replay(
        self, model: Model, operations: Sequence[Operation], generation: Generation
    ) -> None:
        unsaved = {
            sampler.seq_id: sampler
            for sampler in await self._store.samplers(model.session_id)
            if sampler.model_id == model.model_id and sampler.location is None
        }
        for kind, run in groupby(operations, key=lambda op: op.kind):
            if kind == _PUBLISH:
                for op in run:
                    if op.seq_id in unsaved:
                        await self._published.publish(unsaved[op.seq_id], generation)
                        self._published.keep(unsaved[op.seq_id])
            elif kind in CHANGING:
                await self._run_again(kind, model, list(run), generation)

    async def _run_again(
        self, kind: str, model: Model, operations: Sequence[Operation], generation: Generation
    ) -> None:
        engine, guard = self._residents.engine, self._residents.guard
        match kind:
            case "forward_backward":
                for start in range(0, len(operations), self._max_batch_ops):
                    part = operations[start : start + self._max_batch_ops]
                    batch = [await self._jobs.train_op(op) for op in part]
                    _check(part, await guard(generation, engine.train(batch)))
            case "optim_step":
                for op in operations:
                    step = [self._jobs.optim_op(op)]
                    _check([op], await guard(generation, engine.optim_step(step)))
            case _:
                await guard(generation, engine.create_adapter(spec_of(model)))


def _check_created(model: Model, done: Sequence[Operation]) -> None:
    first = done[0] if done and done[0].seq_id == 0 else None
    if first is not None and first.outcome is not None and first.outcome.error is not None:
        raise RequestFailedError(
            f"the model was not created: {first.outcome.error}", None, first.outcome.category
        )
    if first is None and model.snapshot_location is None:
        raise RequestFailedError(f"model {model.model_id!r} has not been created", None, "user")


def _successes(done: Iterable[Operation]) -> list[Operation]:
    return [op for op in done if op.outcome is not None and op.outcome.error is None]


def _check(
    operations: Sequence[Operation],
    answers: Sequence[TrainResult | RequestFailedError]
    | Sequence[OptimResult | RequestFailedError],
) -> None:
    for op, answer in zip(operations, cast("Sequence[object]", answers), strict=True):
        if isinstance(answer, RequestFailedError):
            raise RequestFailedError(
                f"model {op.model_id!r} cannot be restored: request {op.seq_id} succeeded once and "
                f"now fails with: {answer.message}",
                None,
                "server",
            )
