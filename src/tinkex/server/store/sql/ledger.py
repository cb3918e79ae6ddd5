"""Answers to idempotency keys, API keys, the audit log, usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, or_, select, tuple_, update

from tinkex.server.store.sql import operations as operations_sql
from tinkex.server.store.sql.database import AT_ONCE
from tinkex.server.store.sql.hints import notify
from tinkex.server.store.sql.operations import add_usage, usage_between
from tinkex.server.store.sql.records import AUDIT, KEYS, insert
from tinkex.server.store.sql.schema import (
    LOCATED,
    OF_NO_SESSION,
    OPEN,
    OVER,
    answers,
    api_keys,
    audit,
    losses,
    models,
    operations,
    results,
    samplers,
    sessions,
)
from tinkex.server.store.sql.state import StoreState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Table

    from tinkex.server.store.records import ApiKey, AuditEntry, HourOfUsage, Refusal, UsageEntry


# The number of a result that no operation and no sample has.
_PROBE = -(1 << 62)


class LedgerQueries(StoreState):
    """The part of the store that is only added to."""

    async def probe(self, size_bytes: int) -> None:
        # Each node has a number of its own.
        number = _PROBE if self._member is None else _PROBE - self._member.number
        row = {"number": number, "finished_at": 0.0, "body": b"\0" * size_bytes}
        gone = delete(results).where(results.c.number == number)
        # Two transactions: what one writes and deletes may never reach the disk.
        await self._database.write(lambda c: c.execute(gone) and c.execute(results.insert(), row))
        await self._database.write(lambda c: c.execute(gone) and None)

    async def recall(self, owner: str, key: str) -> str | None:
        query = select(answers.c.answer).where(answers.c.owner == owner, answers.c.key == key)
        return await self._database.read(lambda c: c.execute(query).scalar_one_or_none())

    async def remember(
        self, owner: str, key: str, answer: str, *, session_id: str | None = None
    ) -> str:
        row = {
            "owner": owner,
            "key": key,
            "answer": answer,
            "created_at": self._behind.clock.wall(),
            "session_id": session_id,
        }
        return await self._database.write(partial(_remember, row=row))

    async def add_key(self, key: ApiKey) -> ApiKey:
        return await self._database.write(partial(_add_key, key=key))

    async def find_key(self, key_hash: str) -> ApiKey | None:
        # Not cached here: the command line revokes keys in another process, and the caller decides
        # how old an answer may be.
        return await self._database.read(lambda c: KEYS.get(c, key_hash))

    async def get_key(self, key_id: int) -> ApiKey | None:
        query = KEYS.select().where(api_keys.c.key_id == key_id)
        found = await self._database.read(lambda c: KEYS.all(c, query))
        return found[0] if found else None

    async def any_key(self, at: float) -> bool:
        unexpired = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > at)
        query = select(api_keys.c.key_id).where(api_keys.c.revoked_at.is_(None), unexpired).limit(1)
        return await self._database.read(lambda c: c.execute(query).first() is not None)

    def use_key(self, key_id: int, at: float) -> None:
        self._behind.use_key(key_id, at)

    async def keys(self, owner: str | None = None) -> Sequence[ApiKey]:
        query = KEYS.select().order_by(api_keys.c.key_id)
        if owner is not None:
            query = query.where(api_keys.c.owner == owner)
        return await self._database.list(lambda c: KEYS.all(c, query))

    async def revoke_key(self, key_id: int, at: float) -> bool:
        def revoke(connection: Connection) -> bool:
            found = _revoke(connection, key_id, at)
            if found:
                # Also from the command line, beside the nodes.
                notify(connection, self._member and self._member.node_id, f"key {key_id}")
            return found

        return await self._database.write(revoke)

    async def audit(self, entry: AuditEntry) -> None:
        query = audit.insert().values(AUDIT.values(entry))
        await self._database.write(lambda c: c.execute(query) and None)
        if self._behind.audit_file is not None:
            await self._behind.audit_file.write([entry])

    def refused(self, refusal: Refusal, at: float) -> None:
        self._behind.refuse(refusal, at)

    async def forget_audit_before(self, at: float, limit: int) -> int:
        old = select(audit.c.number).where(audit.c.at < at).order_by(audit.c.at)
        query = delete(audit).where(audit.c.number.in_(old.limit(min(limit, AT_ONCE))))
        return await self._database.write(lambda c: c.execute(query).rowcount)

    async def audit_log(
        self,
        owner: str | None,
        *,
        topic: str | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int | None = None,
    ) -> Sequence[AuditEntry]:
        query = AUDIT.select()
        if owner is not None:
            query = query.where(audit.c.owner == owner)
        if topic is not None:
            query = query.where(audit.c.topic == topic)
        if start is not None:
            query = query.where(audit.c.at >= start)
        if end is not None:
            query = query.where(audit.c.at < end)
        query = query.order_by(audit.c.at.desc(), audit.c.number.desc()).limit(limit)
        return await self._database.list(lambda c: AUDIT.all(c, query)[::-1])

    async def add_usage(self, entry: UsageEntry) -> None:
        if entry.kind == "sample":
            self._behind.use(entry)
        else:
            await self._database.write(partial(add_usage, entry=entry))

    async def usage(self, owner: str, start: float, end: float) -> Sequence[HourOfUsage]:
        await self._behind.write_usage()
        return await self._database.list(lambda c: usage_between(c, owner, start, end))


def _remember(connection: Connection, row: dict[str, Any]) -> str:
    query = insert(connection, answers).values(row).on_conflict_do_nothing()
    kept = connection.execute(query.returning(answers.c.answer)).scalar_one_or_none()
    if kept is not None:
        return kept
    ours = (answers.c.owner == row["owner"], answers.c.key == row["key"])
    first = connection.execute(select(answers.c.answer).where(*ours)).scalar_one_or_none()
    return row["answer"] if first is None else first


def _add_key(connection: Connection, key: ApiKey) -> ApiKey:
    values = {name: value for name, value in KEYS.values(key).items() if name != "key_id"}
    query = insert(connection, api_keys).values(values)
    connection.execute(query.on_conflict_do_nothing(index_elements=["key_hash"]))
    kept = KEYS.get(connection, key.key_hash)
    assert kept is not None  # keys are never deleted
    return kept


def _revoke(connection: Connection, key_id: int, at: float) -> bool:
    query = (
        update(api_keys)
        .where(api_keys.c.key_id == key_id, api_keys.c.revoked_at.is_(None))
        .values(revoked_at=at)
    )
    return connection.execute(query).rowcount > 0


@dataclass(slots=True)
class _Forgotten:
    """What one transaction deleted, and how much more it may."""

    left: int
    count: int = 0
    sessions: Sequence[str] = ()
    samplers: Sequence[str] = ()
    operations: list[str] = field(default_factory=list[str])

    def add(self, count: int) -> None:
        self.count += count
        self.left -= count


class PruningQueries(StoreState):
    """The part of the store that forgets."""

    async def prune(self, before: float, limit: int) -> int:
        do = partial(_prune, before=before, limit=min(limit, AT_ONCE))
        return await self._database.write_alone(do, self._forget)

    def _forget(self, gone: _Forgotten) -> int:
        for session_id in gone.sessions:
            self._session_cache.discard(session_id)
        for sampler_id in gone.samplers:
            self._sampler_cache.discard(sampler_id)
        for op_id in gone.operations:
            self._finished.discard(op_id)
        return gone.count


def _prune(connection: Connection, before: float, limit: int) -> _Forgotten:
    gone = _Forgotten(left=limit)
    name = tuple_(answers.c.owner, answers.c.key)
    old = select(answers.c.owner, answers.c.key).where(OF_NO_SESSION, answers.c.created_at < before)
    gone.add(connection.execute(delete(answers).where(name.in_(old.limit(limit)))).rowcount)
    over = _over(connection, before, gone.left)
    _forget_operations(connection, over, gone)
    gone.samplers = _forget_of(connection, samplers, "sampler_id", over, gone)
    _forget_of(connection, losses, "loss_id", over, gone)
    old = select(answers.c.owner, answers.c.key).where(answers.c.session_id.in_(over))
    gone.add(connection.execute(delete(answers).where(name.in_(old.limit(gone.left)))).rowcount)
    # The sessions last, and only when nothing of them is left: they lead to the rest.
    if gone.left > 0:
        gone.sessions = over[: gone.left]
        connection.execute(delete(sessions).where(sessions.c.session_id.in_(gone.sessions)))
        gone.add(len(gone.sessions))
    return gone


def _over(connection: Connection, before: float, limit: int) -> Sequence[str]:
    """Sessions of which nothing is needed any more, oldest first."""
    ours = sessions.c.session_id
    opened = select(models.c.number).where(models.c.session_id == ours, OPEN)
    located = select(samplers.c.number).where(samplers.c.session_id == ours, LOCATED)
    later = select(operations.c.number).where(
        operations.c.session_id == ours,
        or_(operations.c.finished_at.is_(None), operations.c.finished_at >= before),
    )
    query = (
        select(ours)
        .where(OVER, sessions.c.last_seen_at < before)
        .where(~opened.exists(), ~located.exists(), ~later.exists())
        .order_by(sessions.c.last_seen_at)
        .limit(limit)
    )
    return connection.execute(query).scalars().all()


def _forget_operations(connection: Connection, over: Sequence[str], gone: _Forgotten) -> None:
    columns = select(operations.c.number, operations.c.op_id)
    found = connection.execute(
        columns.where(operations.c.session_id.in_(over)).limit(gone.left)
    ).all()
    operations_sql.forget(connection, [row.number for row in found])
    gone.operations = [row.op_id for row in found]
    gone.add(len(found))


def _forget_of(
    connection: Connection, table: Table, key: str, over: Sequence[str], gone: _Forgotten
) -> Sequence[str]:
    some = select(table.c[key]).where(table.c.session_id.in_(over)).limit(gone.left)
    found: Sequence[Any] = connection.execute(some).scalars().all()
    connection.execute(delete(table).where(table.c[key].in_(found)))
    gone.add(len(found))
    return found
