"""Models, checkpoints and custom losses."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, delete, func, or_, select, union_all

from tinkex.server.store.records import KeptPart, LimitReached, row_bytes
from tinkex.server.store.sql.kept import all_kept, count_kept
from tinkex.server.store.sql.records import CHECKPOINTS, LOSSES, MODELS, SESSIONS, beside_index
from tinkex.server.store.sql.schema import (
    ACTIVE,
    OPEN,
    PUBLIC,
    checkpoints,
    losses,
    models,
    sessions,
)
from tinkex.server.store.sql.state import StoreState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Select, Table

    from tinkex.server.store.records import (
        CheckpointKind,
        Model,
        Part,
        StoredCheckpoint,
        StoredLoss,
    )


# What only the node that owns the model may change.
_OF_THE_OWNER = frozenset({"snapshot_location", "snapshot_seq", "corrupted"})


class ModelQueries(StoreState):
    """The part of the store that knows what can be trained, and what was saved of it."""

    async def add_model(
        self,
        model: Model,
        *,
        max_models: int | None = None,
        max_runs: int | None = None,
        silent_since: float = 0.0,
    ) -> Model | LimitReached:
        version = self._model_cache.version

        def add(connection: Connection) -> Model | LimitReached:
            if max_models is not None or max_runs is not None:
                self._count_alone(connection, model.owner)
                known = MODELS.get(connection, model.model_id)
                if known is not None:
                    return known
            reached = _reached(connection, model.owner, max_models, max_runs, silent_since)
            return reached or MODELS.add(connection, model, row_bytes=row_bytes(model))

        def keep(kept: Model | LimitReached) -> Model | LimitReached:
            return kept if isinstance(kept, LimitReached) else self._keep_model(kept, version)

        return await self._database.write_alone(add, keep)

    async def put_model(self, model: Model) -> None:
        version = self._model_cache.version

        def put(connection: Connection) -> None:
            MODELS.put(connection, model, row_bytes=row_bytes(model))
            self._hint(connection, f"model {model.model_id}")

        await self._database.write_alone(put, lambda _: self._keep_model(model, version) and None)

    async def change_model(self, model_id: str, **fields: Any) -> None:
        version = self._model_cache.version
        tenure = self._tenure(model_id) if _OF_THE_OWNER & fields.keys() else None

        def change(connection: Connection) -> Model | None:
            if tenure is not None:
                tenure.check(connection)
            known = MODELS.get(connection, model_id, lock=True)
            return None if known is None else self._replace(connection, known, fields)

        await self._database.write(change, lambda m: m and self._keep_model(m, version) and None)

    async def move_model(self, model: Model, session_id: str) -> bool:
        version = self._model_cache.version

        def move(connection: Connection) -> Model | None:
            # Locked: its end waits, and then finds that the model is no longer its own.
            old = SESSIONS.get(connection, model.session_id, lock=True)
            known = MODELS.get(connection, model.model_id, lock=True)
            if old is None or not old.active:
                return None
            if known is None or known.session_id != model.session_id:
                return None
            return self._replace(connection, known, {"session_id": session_id})

        def keep(moved: Model | None) -> bool:
            if moved is not None:
                self._keep_model(moved, version)
            return moved is not None

        return await self._database.write_alone(move, keep)

    def _replace(self, connection: Connection, known: Model, fields: dict[str, Any]) -> Model:
        new = replace(known, **fields)
        MODELS.change(connection, known.model_id, **fields, row_bytes=row_bytes(new))
        self._hint(connection, f"model {known.model_id}")
        return new

    async def get_model(self, model_id: str) -> Model | None:
        known = self._model_cache.get(model_id)
        if known is not None:
            return known
        version = self._model_cache.version
        return await self._database.read(
            lambda c: MODELS.get(c, model_id),
            lambda m: None if m is None else self._keep_model(m, version),
        )

    async def models(
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        project_id: str | None = None,
        published_at: float | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[Model]:
        query = _where(MODELS.select(), models, session_id=session_id, project_id=project_id)
        if published_at is not None:
            page = _accessible(owner, published_at, project_id, offset, limit)
            query, offset, limit = MODELS.select().where(models.c.number.in_(page)), 0, None
        elif owner is not None:
            query = query.where(models.c.owner == owner)
        query = query.order_by(models.c.number.desc()).limit(limit).offset(offset or None)
        return await self._database.list(lambda c: MODELS.all(c, query))

    async def count_models(
        self, owner: str, *, project_id: str | None = None, published_at: float | None = None
    ) -> int:
        count = _where(select(func.count()).select_from(models), models, project_id=project_id)
        queries = [count.where(models.c.owner == owner)]
        if published_at is not None:
            queries.append(count.where(_published_by_others(owner, published_at)))
        return await self._database.list(
            lambda c: sum(c.execute(query).scalar_one() for query in queries)
        )

    async def open_models(self, owner: str | None = None) -> Sequence[Model]:
        # By time first: ordered by number alone, SQLite would rather read the whole table.
        query = MODELS.select().where(OPEN).order_by(models.c.created_at, models.c.number)
        if owner is not None:
            query = query.where(beside_index(models.c.owner, owner))
        return await self._database.read(lambda c: MODELS.all(c, query))

    def _keep_model(self, model: Model, version: int) -> Model:
        self._model_cache.put(model.model_id, model, version)
        return model

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        size = row_bytes(checkpoint)
        await self._database.write_alone(lambda c: CHECKPOINTS.put(c, checkpoint, row_bytes=size))

    async def change_checkpoint(self, checkpoint: StoredCheckpoint, **fields: Any) -> bool:
        def change(connection: Connection) -> bool:
            known = CHECKPOINTS.get(connection, checkpoint.path, lock=True)
            if known is None or known.location != checkpoint.location:
                return False
            size = row_bytes(replace(known, **fields))
            CHECKPOINTS.change(connection, checkpoint.path, **fields, row_bytes=size)
            return True

        return await self._database.write_alone(change)

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None:
        return await self._database.read(lambda c: CHECKPOINTS.get(c, path))

    async def delete_checkpoint(self, checkpoint: StoredCheckpoint) -> bool:
        query = delete(checkpoints).where(
            checkpoints.c.path == checkpoint.path, checkpoints.c.location == checkpoint.location
        )
        return await self._database.write_alone(lambda c: c.execute(query).rowcount > 0)

    async def checkpoints(
        self,
        *,
        owner: str | None = None,
        model_id: str | None = None,
        kinds: Collection[CheckpointKind] | None = None,
        public: bool = False,
        live_at: float | None = None,
        expired_at: float | None = None,
        project_id: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[StoredCheckpoint]:
        query = _where(
            CHECKPOINTS.select(),
            checkpoints,
            owner=owner,
            model_id=model_id,
            project_id=project_id,
        )
        query = _living(query, live_at, kinds)
        if public:
            query = query.where(PUBLIC)
        if expired_at is not None:
            query = query.where(checkpoints.c.expires_at <= expired_at)
        query = query.order_by(checkpoints.c.created_at.desc(), checkpoints.c.number.desc())
        query = query.limit(limit).offset(offset or None)
        return await self._database.list(lambda c: CHECKPOINTS.all(c, query))

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
        return await self._database.list(lambda c: CHECKPOINTS.all(c, query))

    async def count_checkpoints(
        self,
        owner: str,
        *,
        live_at: float,
        kinds: Collection[CheckpointKind] | None = None,
        project_id: str | None = None,
    ) -> int:
        count = select(func.count()).select_from(checkpoints)
        ours = _where(count, checkpoints, owner=owner, project_id=project_id)
        query = _living(ours, live_at, kinds)
        return await self._database.list(lambda c: c.execute(query).scalar_one())

    async def kept(self, owner: str) -> Mapping[Part, KeptPart]:
        return await self._database.list(partial(all_kept, owner=owner))

    async def stored_by_project(
        self, owner: str, *, live_at: float, project_id: str | None = None
    ) -> Mapping[str | None, KeptPart]:
        project, size = checkpoints.c.project_id, func.sum(checkpoints.c.size_bytes)
        columns: Select[Any] = select(project).add_columns(func.count(), size)
        ours = _where(columns, checkpoints, owner=owner, project_id=project_id)
        query = _living(ours, live_at).group_by(project).order_by(project)
        rows: Sequence[Any] = await self._database.list(lambda c: c.execute(query).all())
        return {row[0]: KeptPart(row[1], int(row[2] or 0)) for row in rows}

    async def saved_by_session(self, session_id: str) -> tuple[int, int]:
        ours = select(models.c.model_id).where(models.c.session_id == session_id)
        query = select(func.count(), func.sum(checkpoints.c.size_bytes)).where(
            checkpoints.c.model_id.in_(ours)
        )
        count, total = await self._database.list(lambda c: tuple(c.execute(query).one()))
        return int(count), int(total or 0)

    async def add_loss(
        self, loss: StoredLoss, *, max_losses: int | None = None
    ) -> StoredLoss | LimitReached:
        def add(connection: Connection) -> StoredLoss | LimitReached:
            if max_losses is not None:
                self._count_alone(connection, loss.owner)
                known = LOSSES.get(connection, loss.loss_id)
                if known is not None:
                    return known
                count = select(func.count()).select_from(losses)
                ours = count.where(losses.c.session_id == loss.session_id)
                have = connection.execute(ours).scalar_one()
                if have >= max_losses:
                    return LimitReached("max_losses", have)
            return LOSSES.add(connection, loss)

        return await self._database.write_alone(add)

    async def get_loss(self, loss_id: str) -> StoredLoss | None:
        return await self._database.read(lambda c: LOSSES.get(c, loss_id))


def _reached(
    connection: Connection,
    owner: str,
    max_models: int | None,
    max_runs: int | None,
    silent_since: float,
) -> LimitReached | None:
    if max_models is not None:
        have = connection.execute(_alive(owner, silent_since)).scalar_one()
        if have >= max_models:
            return LimitReached("max_models", have)
    if max_runs is not None:
        have = count_kept(connection, owner, "runs").count
        if have >= max_runs:
            return LimitReached("max_runs", have)
    return None


def _alive(owner: str, silent_since: float) -> Select[Any]:
    """How many open models have a session that is active, or were used lately if it is silent."""
    living = and_(
        sessions.c.session_id == models.c.session_id,
        ACTIVE,
        or_(sessions.c.heartbeats, models.c.last_request_at > silent_since),
    )
    both = models.join(sessions, living)
    ours = beside_index(models.c.owner, owner)
    return select(func.count()).select_from(both).where(OPEN, ours)


def _published_by_others(owner: str | None, at: float) -> ColumnElement[bool]:
    # Written so that no index on the time serves: most checkpoints have none, and few are public.
    lives = func.coalesce(checkpoints.c.expires_at, math.inf) > at
    public = select(checkpoints.c.model_id).where(PUBLIC, lives)
    return and_(models.c.model_id.in_(public), models.c.owner != owner)


def _accessible(
    owner: str | None, at: float, project_id: str | None, offset: int, limit: int | None
) -> Select[Any]:
    """The numbers of a page of an owner's models and published ones."""
    most = None if limit is None else offset + limit
    number = models.c.number
    each = _where(select(number), models, project_id=project_id)
    own = each.where(models.c.owner == owner).order_by(number.desc())
    # Not by the number itself: SQLite would rather go through the whole table in its order.
    others = each.where(_published_by_others(owner, at)).order_by((number + 0).desc())
    both = union_all(
        *(select(part.limit(most).subquery().c.number) for part in (own, others))
    ).subquery()
    return select(both.c.number).order_by(both.c.number.desc()).limit(limit).offset(offset or None)


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
