"""Models, samplers, checkpoints and custom losses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import delete, update

from tinkex.server.store.sql.records import CHECKPOINTS, LOSSES, MODELS, SAMPLERS
from tinkex.server.store.sql.schema import checkpoints, models, samplers
from tinkex.server.store.sql.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from tinkex.server.store.records import Model, Sampler, StoredCheckpoint, StoredLoss


class Weights(Shared):
    """The part of the store that knows what can be trained and sampled."""

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

    def _keep_model(self, model: Model) -> Model:
        self._model_cache.put(model.model_id, model)
        return model

    async def add_sampler(self, sampler: Sampler) -> Sampler:
        return await self._database.write(lambda c: SAMPLERS.add(c, sampler), self._keep_sampler)

    async def put_sampler(self, sampler: Sampler) -> None:
        await self._database.write(
            lambda c: SAMPLERS.put(c, sampler), lambda _: self._keep_sampler(sampler)
        )

    async def get_sampler(self, sampler_id: str) -> Sampler | None:
        known = self._sampler_cache.get(sampler_id)
        if known is not None:
            return known
        return await self._database.read(
            lambda c: SAMPLERS.get(c, sampler_id),
            lambda s: None if s is None else self._keep_sampler(s),
        )

    async def samplers(self, session_id: str | None = None) -> Sequence[Sampler]:
        query = SAMPLERS.select().order_by(samplers.c.number)
        if session_id is not None:
            query = query.where(samplers.c.session_id == session_id)
        return await self._database.read(lambda c: SAMPLERS.all(c, query))

    async def join_sampler(self, sampler_id: str) -> int:
        return await self._database.write(partial(_join, sampler_id=sampler_id))

    def _keep_sampler(self, sampler: Sampler) -> Sampler:
        self._sampler_cache.put(sampler.sampler_id, sampler)
        return sampler

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


def _join(connection: Connection, sampler_id: str) -> int:
    query = (
        update(samplers)
        .where(samplers.c.sampler_id == sampler_id)
        .values(copies=samplers.c.copies + 1)
        .returning(samplers.c.copies)
    )
    return connection.execute(query).scalar_one_or_none() or 0
