"""Models, samplers, checkpoints and custom losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import delete

from tinkex.server.store.sql.records import CHECKPOINTS, LOSSES, MODELS
from tinkex.server.store.sql.schema import OPEN, checkpoints, models
from tinkex.server.store.sql.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.server.store.records import Model, StoredCheckpoint, StoredLoss


class Weights(Shared):
    """The part of the store that knows what can be trained, and what was saved of it."""

    async def add_model(self, model: Model) -> Model:
        return await self._database.write(lambda c: MODELS.add(c, model), self._keep_model)

    async def put_model(self, model: Model) -> None:
        await self._database.write(
            lambda c: MODELS.put(c, model), lambda _: self._keep_model(model)
        )

    async def get_model(self, model_id: str) -> Model | None:
        known = self._model_cache.get(model_id)
        if known is not None:
            return known
        return await self._database.read(
            lambda c: MODELS.get(c, model_id), lambda m: None if m is None else self._keep_model(m)
        )

    async def models(
        self, *, owner: str | None = None, session_id: str | None = None
    ) -> Sequence[Model]:
        query = MODELS.select().order_by(models.c.number.desc())
        if owner is not None:
            query = query.where(models.c.owner == owner)
        if session_id is not None:
            query = query.where(models.c.session_id == session_id)
        return await self._database.read(lambda c: MODELS.all(c, query))

    async def open_models(self, owner: str | None = None) -> Sequence[Model]:
        # By time first: ordered by number alone, SQLite would rather read the whole table.
        query = MODELS.select().where(OPEN).order_by(models.c.created_at, models.c.number)
        if owner is not None:
            query = query.where(models.c.owner == owner)
        return await self._database.read(lambda c: MODELS.all(c, query))

    def _keep_model(self, model: Model) -> Model:
        self._model_cache.put(model.model_id, model)
        return model

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        await self._database.write(lambda c: CHECKPOINTS.put(c, checkpoint))

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None:
        return await self._database.read(lambda c: CHECKPOINTS.get(c, path))

    async def delete_checkpoint(self, path: str) -> bool:
        query = delete(checkpoints).where(checkpoints.c.path == path)
        return await self._database.write(lambda c: c.execute(query).rowcount > 0)

    async def checkpoints(
        self,
        *,
        owner: str | None = None,
        model_id: str | None = None,
        expired_at: float | None = None,
    ) -> Sequence[StoredCheckpoint]:
        query = CHECKPOINTS.select()
        query = query.order_by(checkpoints.c.created_at.desc(), checkpoints.c.number.desc())
        if owner is not None:
            query = query.where(checkpoints.c.owner == owner)
        if model_id is not None:
            query = query.where(checkpoints.c.model_id == model_id)
        if expired_at is not None:
            query = query.where(checkpoints.c.expires_at <= expired_at)
        return await self._database.read(lambda c: CHECKPOINTS.all(c, query))

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        return await self._database.write(lambda c: LOSSES.add(c, loss))

    async def get_loss(self, loss_id: str) -> StoredLoss | None:
        return await self._database.read(lambda c: LOSSES.get(c, loss_id))
