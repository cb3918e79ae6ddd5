"""Answers to idempotency keys, API keys, the audit log, usage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from tinkex.server.store.sql.database import Shared
from tinkex.server.store.sql.operations import add_usage, usage_between
from tinkex.server.store.sql.records import AUDIT, KEYS, insert
from tinkex.server.store.sql.schema import answers, api_keys, audit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from tinkex.server.store.records import ApiKey, AuditEntry, UsageEntry


class Ledger(Shared):
    """The part of the store that is only added to."""

    async def recall(self, owner: str, key: str) -> str | None:
        query = select(answers.c.answer).where(answers.c.owner == owner, answers.c.key == key)
        return await self._database.read(lambda c: c.execute(query).scalar_one_or_none())

    async def remember(
        self, owner: str, key: str, answer: str, *, session_id: str | None = None
    ) -> None:
        row = {
            "owner": owner,
            "key": key,
            "answer": answer,
            "created_at": self._behind.clock.wall(),
            "session_id": session_id,
        }
        await self._database.write(partial(_remember, row=row))

    async def add_key(self, key: ApiKey) -> ApiKey:
        return await self._database.write(partial(_add_key, key=key))

    async def find_key(self, key_hash: str) -> ApiKey | None:
        # Not kept in memory here: the command line revokes keys in another process, and whoever
        # asks knows how long an answer may be old.
        return await self._database.read(lambda c: KEYS.get(c, key_hash))

    async def keys(self, owner: str | None = None) -> Sequence[ApiKey]:
        query = KEYS.select().order_by(api_keys.c.key_id)
        if owner is not None:
            query = query.where(api_keys.c.owner == owner)
        return await self._database.read(lambda c: KEYS.all(c, query))

    async def revoke_key(self, key_id: int, at: float) -> bool:
        return await self._database.write(partial(_revoke, key_id=key_id, at=at))

    async def audit(self, entry: AuditEntry) -> None:
        query = audit.insert().values(AUDIT.values(entry))
        await self._database.write(lambda c: c.execute(query) and None)

    async def audit_log(
        self,
        owner: str,
        *,
        topic: str | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int | None = None,
    ) -> Sequence[AuditEntry]:
        query = AUDIT.select().where(audit.c.owner == owner)
        if topic is not None:
            query = query.where(audit.c.topic == topic)
        if start is not None:
            query = query.where(audit.c.at >= start)
        if end is not None:
            query = query.where(audit.c.at < end)
        query = query.order_by(audit.c.at.desc(), audit.c.number.desc()).limit(limit)
        return await self._database.read(lambda c: AUDIT.all(c, query)[::-1])

    async def add_usage(self, entry: UsageEntry) -> None:
        if entry.kind == "sample":
            self._behind.use(entry)
        else:
            await self._database.write(partial(add_usage, entry=entry))

    async def usage(self, owner: str, start: float, end: float) -> Sequence[UsageEntry]:
        await self._behind.write_usage()
        return await self._database.read(lambda c: usage_between(c, owner, start, end))


def _remember(connection: Connection, row: dict[str, Any]) -> None:
    connection.execute(insert(connection, answers).values(row).on_conflict_do_nothing())


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
