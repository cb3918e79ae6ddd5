"""Models, checkpoints and custom losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, or_, select

from tinkex.server.store.sql.database import StoreState
from tinkex.server.store.sql.records import CHECKPOINTS, LOSSES, MODELS, beside_index
from tinkex.server.store.sql.schema import OPEN, PUBLIC, checkpoints, models

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import Select, Table

    from tinkex.server.store.records import CheckpointKind, Model, StoredCheckpoint, StoredLoss


class ModelQueries(StoreState):
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
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        project_id: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[Model]:
        query = _where(
            MODELS.select(), models, owner=owner, session_id=session_id, project_id=project_id
        )
        query = query.order_by(models.c.number.desc()).limit(limit).offset(offset or None)
        return await self._database.read(lambda c: MODELS.all(c, query))

    async def count_models(self, owner: str, *, project_id: str | None = None) -> int:
        count = select(func.count()).select_from(models)
        query = _where(count, models, owner=owner, project_id=project_id)
        return await self._database.read(lambda c: c.execute(query).scalar_one())

    async def open_models(self, owner: str | None = None) -> Sequence[Model]:
        # By time first: ordered by number alone, SQLite would rather read the whole table.
        query = MODELS.select().where(OPEN).order_by(models.c.created_at, models.c.number)
        if owner is not None:
            query = query.where(beside_index(models.c.owner, owner))
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
        kinds: Collection[CheckpointKind] | None = None,
        public: bool = False,
        live_at: float | None = None,
        expired_at: float | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[StoredCheckpoint]:
        query = _where(CHECKPOINTS.select(), checkpoints, owner=owner, model_id=model_id)
        query = _living(query, live_at, kinds)
        if public:
            query = query.where(PUBLIC)
        if expired_at is not None:
            query = query.where(checkpoints.c.expires_at <= expired_at)
        query = query.order_by(checkpoints.c.created_at.desc(), checkpoints.c.number.desc())
        query = query.limit(limit).offset(offset or None)
        return await self._database.read(lambda c: CHECKPOINTS.all(c, query))

    async def newest_checkpoints(
        self,
        model_ids: Collection[str],
        *,
        kinds: Collection[CheckpointKind],
        live_at: float,
        public: bool = False,
    ) -> Sequence[StoredCheckpoint]:
        order = (checkpoints.c.created_at.desc(), checkpoints.c.number.desc())
        group = (checkpoints.c.model_id, checkpoints.c.kind)
        place = func.row_number().over(partition_by=group, order_by=order).label("place")
        ours: Select[Any] = select(checkpoints.c.number).add_columns(place)
        ours = ours.where(checkpoints.c.model_id.in_(model_ids))
        ranked = _living(ours.where(PUBLIC) if public else ours, live_at, kinds).subquery()
        first = select(ranked.c.number).where(ranked.c.place == 1)
        query = CHECKPOINTS.select().where(checkpoints.c.number.in_(first))
        return await self._database.read(lambda c: CHECKPOINTS.all(c, query))

    async def count_checkpoints(
        self, owner: str, *, live_at: float, kinds: Collection[CheckpointKind] | None = None
    ) -> int:
        count = select(func.count()).select_from(checkpoints)
        query = _living(_where(count, checkpoints, owner=owner), live_at, kinds)
        return await self._database.read(lambda c: c.execute(query).scalar_one())

    async def stored_bytes(self, owner: str, *, live_at: float) -> int:
        total = select(func.sum(checkpoints.c.size_bytes))
        query = _living(_where(total, checkpoints, owner=owner), live_at)
        return await self._database.read(lambda c: int(c.execute(query).scalar_one() or 0))

    async def saved_by_session(self, session_id: str) -> tuple[int, int]:
        ours = select(models.c.model_id).where(models.c.session_id == session_id)
        query = select(func.count(), func.sum(checkpoints.c.size_bytes)).where(
            checkpoints.c.model_id.in_(ours)
        )
        count, total = await self._database.read(lambda c: tuple(c.execute(query).one()))
        return int(count), int(total or 0)

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        return await self._database.write(lambda c: LOSSES.add(c, loss))

    async def get_loss(self, loss_id: str) -> StoredLoss | None:
        return await self._database.read(lambda c: LOSSES.get(c, loss_id))


def _where(query: Select[Any], table: Table, **columns: str | None) -> Select[Any]:
    """With those conditions that are given."""
    given = {name: value for name, value in columns.items() if value is not None}
    return query.where(*(table.c[name] == value for name, value in given.items()))


def _living(
    query: Select[Any], at: float | None, kinds: Collection[CheckpointKind] | None = None
) -> Select[Any]:
    if at is not None:
        expires_at = checkpoints.c.expires_at
        query = query.where(or_(expires_at.is_(None), expires_at > at))
    return query if kinds is None else query.where(checkpoints.c.kind.in_(kinds))
