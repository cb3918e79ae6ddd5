"""How much of each kind an owner has: one row each, which the database itself keeps right.

Triggers add to it in the transaction of every insert, update and delete, so no query has to go
through an owner's rows to know what they take up. Bodies, results and samplers are summed up
instead: they are few at a time, and the first two change with every training step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, PrimaryKeyConstraint, Table, Text, func, select

from tinkex.server.store.records import KeptPart
from tinkex.server.store.sql.schema import METADATA, SIZED, bodies, results, samplers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import ColumnElement, Connection, Select

    from tinkex.server.store.records import Part

kept = Table(
    "kept",
    METADATA,
    Column("owner", Text, nullable=False),
    Column("part", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint("owner", "part", name="kept_pkc"),
)

# The tables that are counted: the name of the part, and what one row takes up.
COUNTED: Final[dict[str, tuple[Part, tuple[str, ...]]]] = {
    "sessions": ("sessions", ("row_bytes",)),
    "models": ("runs", ("row_bytes",)),
    "checkpoints": ("checkpoints", ("size_bytes", "row_bytes")),
    "losses": ("losses", ("size_bytes",)),
}


def count_kept(connection: Connection, owner: str, part: Part) -> KeptPart:
    """What an owner has of a part that is counted."""
    columns: Select[Any] = select(kept.c.count).add_columns(kept.c.size_bytes)
    query = columns.where(kept.c.owner == owner, kept.c.part == part)
    row: Any = connection.execute(query).one_or_none()
    return KeptPart() if row is None else KeptPart(*row)


def all_kept(connection: Connection, owner: str) -> dict[Part, KeptPart]:
    """What an owner has of every part."""
    found: dict[Part, KeptPart] = {
        part: count_kept(connection, owner, part) for part, _ in COUNTED.values()
    }
    sums: dict[Part, Select[Any]] = {
        "samplers": _sum(samplers, samplers.c.size_bytes, owner).where(SIZED),
        "requests": _sum(bodies, bodies.c.size_bytes, owner),
        "results": _sum(results, results.c.size_bytes, owner),
    }
    for part, query in sums.items():
        row: Any = connection.execute(query).one()
        found[part] = KeptPart(row[0], int(row[1] or 0))
    return found


def _sum(table: Table, size: ColumnElement[int], owner: str) -> Select[Any]:
    columns: Select[Any] = select(func.count()).add_columns(func.sum(size))
    return columns.where(table.c.owner == owner)


def triggers(dialect: str) -> Iterator[str]:
    """The statements that make the triggers."""
    for table, (part, columns) in COUNTED.items():
        new, old = (" + ".join(f"{row}.{name}" for name in columns) for row in ("NEW", "OLD"))
        insert = (
            f"INSERT INTO kept (owner, part, count, size_bytes) VALUES (NEW.owner, '{part}', 1, "
            f"{new}) ON CONFLICT (owner, part) DO UPDATE SET count = kept.count + 1, "
            "size_bytes = kept.size_bytes + excluded.size_bytes"
        )
        where = f"WHERE owner = OLD.owner AND part = '{part}'"
        delete = f"UPDATE kept SET count = count - 1, size_bytes = size_bytes - ({old}) {where}"
        update = f"UPDATE kept SET size_bytes = size_bytes + ({new}) - ({old}) {where}"
        changes = {
            "INSERT": insert,
            "DELETE": delete,
            f"UPDATE OF {', '.join(columns)}": update,
        }
        yield from (_postgresql if dialect == "postgresql" else _sqlite)(table, changes)


def _sqlite(table: str, changes: dict[str, str]) -> Iterator[str]:
    for when, statement in changes.items():
        name = f"{table}_kept_{when.partition(' ')[0].lower()}"
        yield f"CREATE TRIGGER {name} AFTER {when} ON {table} BEGIN {statement}; END"


def _postgresql(table: str, changes: dict[str, str]) -> Iterator[str]:
    for when, statement in changes.items():
        name = f"{table}_kept_{when.partition(' ')[0].lower()}"
        yield (
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {statement}; RETURN NULL; END $$"
        )
        yield (
            f"CREATE TRIGGER {name} AFTER {when} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"
        )


def counts() -> Iterator[str]:
    """The statements that count what is there already."""
    for table, (part, columns) in COUNTED.items():
        yield (
            f"INSERT INTO kept (owner, part, count, size_bytes) SELECT owner, '{part}', count(*), "
            f"sum({' + '.join(columns)}) FROM {table} GROUP BY owner"
        )
