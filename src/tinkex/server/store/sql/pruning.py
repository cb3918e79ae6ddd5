"""Forgetting what ended long ago, a bounded number of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, or_, select, tuple_

from tinkex.server.store.sql import operations as operations_sql
from tinkex.server.store.sql.database import AT_ONCE, Shared
from tinkex.server.store.sql.schema import (
    LOCATED,
    OF_NO_SESSION,
    OPEN,
    OVER,
    answers,
    losses,
    models,
    operations,
    samplers,
    sessions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Table


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


class Pruning(Shared):
    """The part of the store that forgets."""

    async def prune(self, before: float, limit: int) -> int:
        do = partial(_prune, before=before, limit=min(limit, AT_ONCE))
        return await self._database.write(do, self._forget)

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
