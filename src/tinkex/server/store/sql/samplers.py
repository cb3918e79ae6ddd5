"""Samplers: weights that somebody may sample from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import func, select, update

from tinkex.server.store.sql.database import AT_ONCE, Shared
from tinkex.server.store.sql.records import SAMPLERS, beside_index
from tinkex.server.store.sql.schema import LOCATED, SIZED, UNSAVED
from tinkex.server.store.sql.schema import samplers as table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from tinkex.server.store.records import Sampler


class Samplers(Shared):
    """The part of the store that knows samplers."""

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

    async def samplers(
        self,
        session_id: str | None = None,
        *,
        model_id: str | None = None,
        location: str | None = None,
        unsaved: bool = False,
        located: bool = False,
    ) -> Sequence[Sampler]:
        # By time first: ordered by number alone, SQLite would rather read the whole table.
        query = SAMPLERS.select().order_by(table.c.created_at, table.c.number)
        if session_id is not None:
            query = query.where(table.c.session_id == session_id)
        if model_id is not None:
            ours = table.c.model_id == model_id
            query = query.where(beside_index(table.c.model_id, model_id) if unsaved else ours)
        if location is not None:
            query = query.where(table.c.location == location)
        if unsaved:
            query = query.where(UNSAVED)
        if located:
            query = query.where(LOCATED)
        return await self._database.read(lambda c: SAMPLERS.all(c, query))

    async def close_samplers(
        self, sampler_ids: Iterable[str], why: str = "its session is over"
    ) -> None:
        ids = list(sampler_ids)
        if ids:
            await self._database.write(
                partial(_close, ids=ids, why=why), lambda _: self._closed(ids, why)
            )

    def _closed(self, ids: Iterable[str], why: str) -> None:
        for sampler_id in ids:
            known = self._sampler_cache.get(sampler_id)
            if known is not None:
                dropped = known.dropped or why
                self._keep_sampler(replace(known, location=None, size_bytes=0, dropped=dropped))

    async def sampler_bytes(self, owner: str) -> int:
        query = select(func.sum(table.c.size_bytes)).where(table.c.owner == owner, SIZED)
        return await self._database.read(lambda c: int(c.execute(query).scalar_one() or 0))

    async def join_sampler(self, sampler_id: str) -> int:
        return await self._database.write(partial(_join, sampler_id=sampler_id))

    def _keep_sampler(self, sampler: Sampler) -> Sampler:
        self._sampler_cache.put(sampler.sampler_id, sampler)
        return sampler


def _close(connection: Connection, ids: Sequence[str], why: str) -> None:
    values = {"location": None, "size_bytes": 0, "dropped": func.coalesce(table.c.dropped, why)}
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        connection.execute(update(table).where(table.c.sampler_id.in_(some)).values(values))


def _join(connection: Connection, sampler_id: str) -> int:
    query = (
        update(table)
        .where(table.c.sampler_id == sampler_id)
        .values(copies=table.c.copies + 1)
        .returning(table.c.copies)
    )
    return connection.execute(query).scalar_one_or_none() or 0
