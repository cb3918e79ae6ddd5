"""Sessions and samplers. Heartbeats are kept in memory and written every few seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, update

from tinkex.server.store.ownership import claim_key
from tinkex.server.store.records import LimitReached, row_bytes
from tinkex.server.store.sql.database import AT_ONCE
from tinkex.server.store.sql.kept import count_kept
from tinkex.server.store.sql.records import SAMPLERS, SESSIONS, beside_index
from tinkex.server.store.sql.schema import (
    ACTIVE,
    LOCATED,
    OPEN,
    UNATTENDED,
    UNSAVED,
    claims,
    models,
    samplers,
    sessions,
)
from tinkex.server.store.sql.state import StoreState
from tinkex.server.store.sql.tenure import claim_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection, Select

    from tinkex.server.store.records import StoredSampler, StoredSession
    from tinkex.types import SessionStatus


class SessionQueries(StoreState):
    """The part of the store that knows sessions."""

    async def put_session(self, session: StoredSession) -> None:
        version = self._session_cache.version

        def put(connection: Connection) -> None:
            _put(connection, session)
            self._hint(connection, f"session {session.session_id}")

        def keep(_: None) -> None:
            self._session_cache.put(session.session_id, self._seen(session), version)

        await self._database.write_alone(put, keep)

    async def change_session(self, session_id: str, **fields: Any) -> None:
        await self._change_session(session_id, lambda known: replace(known, **fields))

    async def end_session(self, session: StoredSession, status: SessionStatus) -> bool:
        def ended(known: StoredSession) -> StoredSession | None:
            return replace(known, status=status) if known.active else None

        return await self._change_session(session.session_id, ended)

    async def _change_session(
        self, session_id: str, change: Callable[[StoredSession], StoredSession | None]
    ) -> bool:
        """Replace a session by what `change` makes of it; False for None, and for an unknown one.

        Its `last_seen_at` stays as it is.
        """
        version = self._session_cache.version

        def do(connection: Connection) -> StoredSession | None:
            known = SESSIONS.get(connection, session_id, lock=True)
            new = None if known is None else change(known)
            if new is not None:
                values = SESSIONS.values(new)
                del values["last_seen_at"]
                more = {"active": new.active, "row_bytes": row_bytes(new)}
                SESSIONS.change(connection, session_id, **values, **more)
                self._hint(connection, f"session {session_id}")
            return new

        def keep(new: StoredSession | None) -> bool:
            if new is not None:
                self._session_cache.put(session_id, self._seen(new), version)
            return new is not None

        return await self._database.write_alone(do, keep)

    async def add_session(
        self, session: StoredSession, *, max_sessions: int | None, max_kept_sessions: int
    ) -> LimitReached | None:
        version = self._session_cache.version

        def add(connection: Connection) -> LimitReached | None:
            self._count_alone(connection, session.owner)
            reached = _reached(connection, session.owner, max_sessions, max_kept_sessions)
            if reached is None:
                _put(connection, session)
            return reached

        def keep(reached: LimitReached | None) -> LimitReached | None:
            if reached is None:
                self._session_cache.put(session.session_id, session, version)
            return reached

        return await self._database.write_alone(add, keep)

    async def get_session(self, session_id: str) -> StoredSession | None:
        known = self._session_cache.get(session_id)
        if known is not None:
            return known
        version = self._session_cache.version
        return await self._database.read(
            lambda c: SESSIONS.get(c, session_id), lambda s: self._keep_session(s, version)
        )

    async def sessions(
        self,
        owner: str | None = None,
        *,
        active: bool = False,
        before: float | None = None,
        limit: int | None = None,
        project_id: str | None = None,
    ) -> Sequence[StoredSession]:
        query = _newest_first(_of(SESSIONS.select(), owner, active=active)).limit(limit)
        if before is not None:
            query = query.where(sessions.c.created_at <= before)
        if project_id is not None:
            query = query.where(sessions.c.project_id == project_id)
        found = await self._database.list(lambda c: SESSIONS.all(c, query))
        return [self._seen(session) for session in found]

    async def session_ids(
        self, owner: str, offset: int, limit: int, *, project_id: str | None = None
    ) -> Sequence[str]:
        query = _newest_first(_of(select(sessions.c.session_id), owner)).offset(offset).limit(limit)
        if project_id is not None:
            query = query.where(sessions.c.project_id == project_id)
        return await self._database.list(lambda c: c.execute(query).scalars().all())

    async def ids_of_session(self, session_id: str) -> tuple[Sequence[str], Sequence[str]]:
        # By time first: ordered by number alone, SQLite would rather read the whole table.
        runs = select(models.c.model_id).where(models.c.session_id == session_id)
        runs = runs.order_by(models.c.created_at, models.c.number)
        ours = select(samplers.c.sampler_id).where(samplers.c.session_id == session_id)
        ours = ours.order_by(samplers.c.created_at, samplers.c.number)
        return await self._database.list(
            lambda c: (c.execute(runs).scalars().all(), c.execute(ours).scalars().all())
        )

    async def count_sessions(
        self, owner: str | None = None, *, active: bool = False, heartbeats: bool = False
    ) -> int:
        query = _of(select(func.count()).select_from(sessions), owner, active=active)
        if heartbeats:
            query = query.where(sessions.c.heartbeats)
        return await self._database.list(lambda c: c.execute(query).scalar_one())

    async def silent_sessions(self, before: float) -> Sequence[StoredSession]:
        query = SESSIONS.select().where(ACTIVE, sessions.c.heartbeats)
        query = query.where(sessions.c.last_seen_at < before).order_by(sessions.c.last_seen_at)
        found = await self._database.list(lambda c: SESSIONS.all(c, query))
        # Heartbeats that are not written yet count.
        seen = map(self._seen, found)
        return [session for session in seen if session.last_seen_at < before]

    async def unattended_sessions(self, before: float, limit: int) -> Sequence[StoredSession]:
        opened = select(models.c.number).where(models.c.session_id == sessions.c.session_id, OPEN)
        query = SESSIONS.select().where(UNATTENDED, sessions.c.last_seen_at < before)
        query = query.where(~opened.exists()).order_by(sessions.c.last_seen_at).limit(limit)
        return await self._database.read(lambda c: SESSIONS.all(c, query))

    async def touch_session(self, session_id: str, at: float) -> StoredSession | None:
        known = await self.get_session(session_id)
        if known is None or not known.active:
            return known
        self._behind.see(session_id, at)
        seen = replace(known, last_seen_at=at)
        self._session_cache.amend(session_id, seen)
        return seen

    async def touch_sessions(self, at: float) -> None:
        # Other nodes write heartbeats, too; a later one counts.
        later = self._member is not None
        touch = partial(_touch_all, at=at, keep_later=later)
        await self._database.write_alone(touch, lambda _: self._touched(at))

    def _touched(self, at: float) -> None:
        self._behind.seen.clear()
        for session_id, session in self._session_cache.items():
            if session.active and session.heartbeats:
                self._session_cache.amend(session_id, replace(session, last_seen_at=at))

    def _keep_session(self, session: StoredSession | None, version: int) -> StoredSession | None:
        if session is None:
            return None
        session = self._seen(session)
        self._session_cache.put(session.session_id, session, version)
        return session

    def _seen(self, session: StoredSession) -> StoredSession:
        """The session with a sign of life that is not written yet."""
        at = self._behind.seen.get(session.session_id)
        newer = at is not None and at > session.last_seen_at
        return replace(session, last_seen_at=at) if newer else session


def _put(connection: Connection, session: StoredSession) -> None:
    more = {"active": session.active, "row_bytes": row_bytes(session)}
    SESSIONS.put(connection, session, **more)


def _reached(
    connection: Connection, owner: str, max_sessions: int | None, max_kept_sessions: int
) -> LimitReached | None:
    if max_sessions is not None:
        count = select(func.count()).select_from(sessions)
        # Clients without heartbeats never report that they are done.
        active = _of(count, owner, active=True).where(sessions.c.heartbeats)
        have = connection.execute(active).scalar_one()
        if have >= max_sessions:
            return LimitReached("max_sessions", have)
    kept = count_kept(connection, owner, "sessions").count
    return LimitReached("max_kept_sessions", kept) if kept >= max_kept_sessions else None


def _newest_first(query: Select[Any]) -> Select[Any]:
    return query.order_by(sessions.c.created_at.desc(), sessions.c.session_id.desc())


def _of(query: Select[Any], owner: str | None, *, active: bool = False) -> Select[Any]:
    if owner is not None:
        query = query.where(sessions.c.owner == owner)
    return query.where(ACTIVE) if active else query


def _touch_all(connection: Connection, at: float, keep_later: bool) -> None:
    query = update(sessions).where(ACTIVE, sessions.c.heartbeats)
    if keep_later:
        query = query.where(sessions.c.last_seen_at < at)
    connection.execute(query.values(last_seen_at=at))


class SamplerQueries(StoreState):
    """The part of the store that knows samplers."""

    async def add_sampler(
        self, sampler: StoredSampler, *, max_samplers: int | None = None
    ) -> StoredSampler | LimitReached:
        version = self._sampler_cache.version

        def add(connection: Connection) -> StoredSampler | LimitReached:
            if max_samplers is not None:
                self._count_alone(connection, sampler.owner)
                known = SAMPLERS.get(connection, sampler.sampler_id)
                if known is not None:
                    return known
                ours = samplers.c.session_id == sampler.session_id
                count = select(func.count()).select_from(samplers).where(ours)
                have = connection.execute(count).scalar_one()
                if have >= max_samplers:
                    return LimitReached("max_samplers", have)
            return SAMPLERS.add(connection, sampler)

        def keep(kept: StoredSampler | LimitReached) -> StoredSampler | LimitReached:
            return kept if isinstance(kept, LimitReached) else self._keep_sampler(kept, version)

        return await self._database.write_alone(add, keep)

    async def put_sampler(self, sampler: StoredSampler) -> None:
        version = self._sampler_cache.version

        def put(connection: Connection) -> None:
            self._check_keys(connection, [claim_key(sampler)])
            SAMPLERS.put(connection, sampler)
            self._hint(connection, f"sampler {sampler.sampler_id}")

        await self._database.write(put, lambda _: self._keep_sampler(sampler, version) and None)

    async def get_sampler(self, sampler_id: str) -> StoredSampler | None:
        known = self._sampler_cache.get(sampler_id)
        if known is not None:
            return known
        version = self._sampler_cache.version
        return await self._database.read(
            lambda c: SAMPLERS.get(c, sampler_id),
            lambda s: None if s is None else self._keep_sampler(s, version),
        )

    async def samplers(
        self,
        session_id: str | None = None,
        *,
        model_id: str | None = None,
        location: str | None = None,
        unsaved: bool = False,
        located: bool = False,
    ) -> Sequence[StoredSampler]:
        # By time first: ordered by number alone, SQLite would rather read the whole samplers.
        query = SAMPLERS.select().order_by(samplers.c.created_at, samplers.c.number)
        if session_id is not None:
            query = query.where(samplers.c.session_id == session_id)
        if model_id is not None:
            ours = samplers.c.model_id == model_id
            query = query.where(beside_index(samplers.c.model_id, model_id) if unsaved else ours)
        if location is not None:
            query = query.where(samplers.c.location == location)
        if unsaved:
            query = query.where(UNSAVED)
        if located:
            query = query.where(LOCATED)
        return await self._database.read(lambda c: SAMPLERS.all(c, query))

    async def close_samplers(
        self, sampler_ids: Iterable[str], why: str = "its session is over"
    ) -> None:
        ids = list(sampler_ids)
        if not ids:
            return

        def close(connection: Connection) -> None:
            if self._member is not None:
                self._check_keys(connection, _keys(connection, ids))
            _close(connection, ids, why)
            for sampler_id in ids:
                self._hint(connection, f"sampler {sampler_id}")

        await self._database.write(close, lambda _: self._closed(ids, why))

    def _closed(self, ids: Iterable[str], why: str) -> None:
        for sampler_id in ids:
            known = self._sampler_cache.get(sampler_id)
            if known is not None:
                dropped = known.dropped or why
                closed = replace(known, location=None, size_bytes=0, dropped=dropped)
                self._sampler_cache.amend(sampler_id, closed)

    async def join_sampler(self, sampler_id: str) -> int:
        return await self._database.write(partial(_join, sampler_id=sampler_id))

    def _keep_sampler(self, sampler: StoredSampler, version: int) -> StoredSampler:
        self._sampler_cache.put(sampler.sampler_id, sampler, version)
        if sampler.model_id is not None and sampler.model_id in self._adopted:
            self._sampler_keys[sampler.sampler_id] = sampler.model_id
        return sampler

    def _check_keys(self, connection: Connection, keys: Sequence[str]) -> None:
        """Raise if another node owns one of these, or this one under another epoch."""
        if self._member is None:
            return
        query = select(claims.c.key, claims.c.node_id, claims.c.epoch)
        for start in range(0, len(keys), AT_ONCE):
            some = claims.c.key.in_(keys[start : start + AT_ONCE])
            for row in connection.execute(query.where(some)):
                ours = row.node_id == self._member.node_id
                if not ours or self._adopted.get(row.key, row.epoch) != row.epoch:
                    raise claim_lost(row.key, self._member.node_id)


def _keys(connection: Connection, ids: Sequence[str]) -> Sequence[str]:
    found: set[str] = set()
    key = func.coalesce(samplers.c.model_id, samplers.c.sampler_id)
    for start in range(0, len(ids), AT_ONCE):
        some = samplers.c.sampler_id.in_(ids[start : start + AT_ONCE])
        found.update(connection.execute(select(key).where(some)).scalars())
    return sorted(found)


def _close(connection: Connection, ids: Sequence[str], why: str) -> None:
    values = {"location": None, "size_bytes": 0, "dropped": func.coalesce(samplers.c.dropped, why)}
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        connection.execute(update(samplers).where(samplers.c.sampler_id.in_(some)).values(values))


def _join(connection: Connection, sampler_id: str) -> int:
    query = (
        update(samplers)
        .where(samplers.c.sampler_id == sampler_id)
        .values(copies=samplers.c.copies + 1)
        .returning(samplers.c.copies)
    )
    return connection.execute(query).scalar_one_or_none() or 0
