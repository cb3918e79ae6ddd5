"""Sessions. Signs of life are kept in memory and written every few seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, update

from tinkex.server.store.sql.database import Shared
from tinkex.server.store.sql.records import SESSIONS
from tinkex.server.store.sql.schema import ACTIVE, OPEN, UNATTENDED, models
from tinkex.server.store.sql.schema import sessions as table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Select

    from tinkex.server.store.records import Session


class Sessions(Shared):
    """The part of the store that knows sessions."""

    async def put_session(self, session: Session) -> None:
        await self._database.write(
            lambda c: SESSIONS.put(c, session, active=session.active),
            lambda _: self._session_cache.put(session.session_id, self._seen(session)),
        )

    async def get_session(self, session_id: str) -> Session | None:
        known = self._session_cache.get(session_id)
        if known is not None:
            return known
        return await self._database.read(lambda c: SESSIONS.get(c, session_id), self._keep_session)

    async def sessions(
        self,
        owner: str | None = None,
        *,
        active: bool = False,
        before: float | None = None,
        limit: int | None = None,
    ) -> Sequence[Session]:
        query = _newest_first(_of(SESSIONS.select(), owner, active=active)).limit(limit)
        if before is not None:
            query = query.where(table.c.created_at <= before)
        found = await self._database.read(lambda c: SESSIONS.all(c, query))
        return [self._seen(session) for session in found]

    async def session_ids(self, owner: str, offset: int, limit: int) -> Sequence[str]:
        query = _newest_first(_of(select(table.c.session_id), owner)).offset(offset).limit(limit)
        return await self._database.read(lambda c: c.execute(query).scalars().all())

    async def count_sessions(
        self, owner: str | None = None, *, active: bool = False, heartbeats: bool = False
    ) -> int:
        query = _of(select(func.count()).select_from(table), owner, active=active)
        if heartbeats:
            query = query.where(table.c.heartbeats)
        return await self._database.read(lambda c: c.execute(query).scalar_one())

    async def unattended_sessions(self, before: float, limit: int) -> Sequence[Session]:
        opened = select(models.c.number).where(models.c.session_id == table.c.session_id, OPEN)
        query = SESSIONS.select().where(UNATTENDED, table.c.last_seen_at < before)
        query = query.where(~opened.exists()).order_by(table.c.last_seen_at).limit(limit)
        return await self._database.read(lambda c: SESSIONS.all(c, query))

    async def touch_session(self, session_id: str, at: float) -> Session | None:
        known = await self.get_session(session_id)
        if known is None or not known.active:
            return known
        self._behind.see(session_id, at)
        return self._keep_session(replace(known, last_seen_at=at))

    async def touch_sessions(self, at: float) -> None:
        await self._database.write(partial(_touch_all, at=at), lambda _: self._touched(at))

    def _touched(self, at: float) -> None:
        self._behind.seen.clear()
        for session_id, session in self._session_cache.items():
            if session.active and session.heartbeats:
                self._session_cache.put(session_id, replace(session, last_seen_at=at))

    def _keep_session(self, session: Session | None) -> Session | None:
        if session is None:
            return None
        session = self._seen(session)
        self._session_cache.put(session.session_id, session)
        return session

    def _seen(self, session: Session) -> Session:
        """The session with a sign of life that is not written yet."""
        at = self._behind.seen.get(session.session_id)
        newer = at is not None and at > session.last_seen_at
        return replace(session, last_seen_at=at) if newer else session


def _newest_first(query: Select[Any]) -> Select[Any]:
    return query.order_by(table.c.created_at.desc(), table.c.session_id.desc())


def _of(query: Select[Any], owner: str | None, *, active: bool = False) -> Select[Any]:
    if owner is not None:
        query = query.where(table.c.owner == owner)
    return query.where(ACTIVE) if active else query


def _touch_all(connection: Connection, at: float) -> None:
    query = update(table).where(ACTIVE, table.c.heartbeats)
    connection.execute(query.values(last_seen_at=at))
