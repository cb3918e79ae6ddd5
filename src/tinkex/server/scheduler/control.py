"""Operations that are neither training nor sampling: creating, loading, saving, unloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import RequestFailedError
from tinkex.server.scheduler.checks import check_loadable, failure, is_readable
from tinkex.server.scheduler.jobs import Done, spec_of
from tinkex.server.scheduler.residents import EngineRestartedError
from tinkex.types import CreateModelResponse, LoadWeightsResponse, UnloadModelResponse, Usage

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.scheduler.jobs import Jobs
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Generation, Residents
    from tinkex.server.scheduler.rows import Rows
    from tinkex.server.scheduler.saves import Saves
    from tinkex.server.scheduler.snapshots import Snapshots
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import LoadOrder, Model, Operation, StoredCheckpoint


def needs_model(op: Operation) -> bool:
    """Whether an operation works on a model that is there; the first one of a model makes it."""
    return op.seq_id != 0 and op.kind != "unload_model"


@dataclass(frozen=True, slots=True)
class Control:
    """Runs one operation at a time of a model; holds nothing of its own."""

    store: Store
    jobs: Jobs
    saves: Saves
    rows: Rows
    residents: Residents
    published: Published
    snapshots: Snapshots
    clock: Clock

    async def run(self, op: Operation) -> Done:
        """Run an operation whose model is there, if it needs one."""
        model = await self.store.get_model(op.model_id or "")
        if model is None:
            raise failure(f"there is no model {op.model_id!r}")
        request = self.jobs.request(op)
        generation = await self.residents.ready()
        if needs_model(op) and not self.residents.has_model(model.model_id):
            raise EngineRestartedError("the engine was started again")
        return Done(await self._run(op, model, request, generation), Usage())

    async def _run(
        self, op: Operation, model: Model, request: Any, generation: Generation
    ) -> object:
        match op.kind:
            case "create_model":
                await self._create(model, generation)
                return CreateModelResponse(model_id=model.model_id)
            case "load_weights":
                return await self._load(op, model, request, generation)
            case "save_weights":
                return await self.saves.state(op, model, request, generation)
            case "save_weights_for_sampler":
                return await self.saves.for_sampler(op, model, request, generation)
            case "save_weights_external":
                return await self.saves.external(op, model, request, generation)
            case "unload_model":
                await self._unload(op, model)
                return UnloadModelResponse(model_id=model.model_id, type="unload_model")
            case _:
                raise RequestFailedError(f"{op.kind} is no control operation", op.op_id, "server")

    async def _create(self, model: Model, generation: Generation) -> None:
        engine, guard = self.residents.engine, self.residents.guard
        # An attempt that was not finished may have left something.
        await guard(generation, engine.drop_adapter(model.model_id))
        await guard(generation, engine.create_adapter(spec_of(model)))
        self.residents.add_model(model.model_id, generation)

    async def _load(
        self, op: Operation, model: Model, order: LoadOrder, generation: Generation
    ) -> LoadWeightsResponse:
        checkpoint = await self._readable(order)
        if checkpoint.base_model != model.base_model:
            raise failure(
                f"{order.path} was trained on {checkpoint.base_model}, "
                f"this model is on {model.base_model}"
            )
        if order.creates_model:
            await self._create(model, generation)
        await self.residents.guard(
            generation,
            self.residents.engine.load_adapter(
                model.model_id, checkpoint.location, optimizer=order.optimizer
            ),
        )
        # The checkpoint may be deleted as soon as the client knows that it was loaded, so from
        # now on the model stands for itself.
        await self.published.saved(model.model_id)
        await self.snapshots.take(model.model_id, op.seq_id)
        return LoadWeightsResponse(path=order.path, model_id=model.model_id, type="load_weights")

    async def _readable(self, order: LoadOrder) -> StoredCheckpoint:
        checkpoint = await self.store.get_checkpoint(order.path)
        if checkpoint is None or not is_readable(checkpoint, order.readers, self.clock.wall()):
            raise failure(f"there is no checkpoint {order.path!r}")
        check_loadable(checkpoint, optimizer=order.optimizer)
        return checkpoint

    async def _unload(self, op: Operation, model: Model) -> None:
        model_id = model.model_id
        await self.published.saved(model_id)
        await self.residents.engine.drop_adapter(model_id)
        self.residents.remove_model(model_id)
        self.snapshots.forget(model_id)
        # Without a location there is nothing to come back to.
        await self.rows.change_model(model_id, snapshot_location=None, snapshot_seq=op.seq_id)
        await self.snapshots.delete(model_id)
