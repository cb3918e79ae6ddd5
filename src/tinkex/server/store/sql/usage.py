"""The SQL of usage: one row per training operation, one per hour of a session's samples.

Samples are too many for a row each and are only ever asked for by the hour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, select, update

from tinkex.server.store.records import UsageEntry
from tinkex.server.store.sql.schema import usage as table
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection

HOUR_S = 3600.0

_WHO = ("owner", "session_id", "base_model", "project_id", "kind")
_AMOUNTS = tuple(Usage.__struct_fields__)


def add_usage(connection: Connection, entry: UsageEntry) -> None:
    """Write one entry down."""
    connection.execute(table.insert().values(_values(entry)))


def add_hourly(connection: Connection, entries: Iterable[UsageEntry]) -> None:
    """Add each entry to its hour's row, which the first of them makes."""
    for entry in entries:
        sums = {name: _sum(name, getattr(entry.usage, name)) for name in _AMOUNTS}
        if connection.execute(update(table).where(_same_hour(entry)).values(sums)).rowcount == 0:
            add_usage(connection, entry)


def usage_between(
    connection: Connection, owner: str, start: float, end: float
) -> Sequence[UsageEntry]:
    """What an owner used from `start` to before `end`, in order."""
    query = (
        select(*(table.c[name] for name in ("at", *_WHO, *_AMOUNTS)))
        .where(table.c.owner == owner, table.c.at >= start, table.c.at < end)
        .order_by(table.c.at, table.c.number)
    )
    return [
        UsageEntry(
            at=row["at"],
            **{name: row[name] for name in _WHO},
            usage=Usage(**{name: row[name] for name in _AMOUNTS}),
        )
        for row in connection.execute(query).mappings()
    ]


def _values(entry: UsageEntry) -> dict[str, Any]:
    who = {name: getattr(entry, name) for name in _WHO}
    amounts = {name: getattr(entry.usage, name) for name in _AMOUNTS}
    return {"at": entry.at, **who, **amounts}


def _same_hour(entry: UsageEntry) -> ColumnElement[bool]:
    start = entry.at // HOUR_S * HOUR_S
    # Compared by `=`, because only that uses the index in PostgreSQL.
    ours = table.c.owner == entry.owner
    who = (table.c[name].is_not_distinct_from(getattr(entry, name)) for name in _WHO)
    return and_(ours, table.c.at >= start, table.c.at < start + HOUR_S, *who)


def _sum(name: str, more: float | None) -> object:
    """What is known of both; unknown only when neither is."""
    column = table.c[name]
    return column if more is None else func.coalesce(column + more, more)
