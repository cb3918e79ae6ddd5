"""Records as rows: a table, the column that names a record, and the record's class.

A record's fields are columns of the same name. A table may have more columns than that; they
belong to the queries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlalchemy import Select, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.records import (
    ApiKey,
    AuditEntry,
    Model,
    StoredCheckpoint,
    StoredLoss,
    StoredSampler,
    StoredSession,
)
from tinkex.server.store.sql import schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Column, ColumnElement, Connection

R = TypeVar("R")


def insert_for(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An insert with `ON CONFLICT`, which SQLAlchemy has per dialect."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def insert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """The same, for the database at hand."""
    return insert_for(connection.dialect.name, table)


def beside_index(column: Column[str], value: str) -> ColumnElement[bool]:
    """Whether a column has a value, written so that no index on the column serves.

    For queries that have a partial index to go by. SQLite cannot tell that it is the shorter one
    and would choose either.
    """
    return column + "" == value


@dataclass(frozen=True)
class Kind(Generic[R]):
    """One kind of record."""

    table: Table
    key: str
    record: type[R]

    @property
    def columns(self) -> Sequence[Column[Any]]:
        return [self.table.c[field.name] for field in fields(cast("Any", self.record))]

    def select(self) -> Select[Any]:
        return select(*self.columns)

    def values(self, record: R) -> dict[str, Any]:
        return {column.name: getattr(record, column.name) for column in self.columns}

    def all(self, connection: Connection, query: Select[Any]) -> list[R]:
        return [self.record(**row) for row in connection.execute(query).mappings()]

    def get(self, connection: Connection, key: str, *, lock: bool = False) -> R | None:
        """One record; with `lock`, it cannot be changed by others until the transaction ends."""
        query = self.select().where(self.table.c[self.key] == key)
        if lock:
            query = query.with_for_update(key_share=True)
        row = connection.execute(query).mappings().one_or_none()
        return None if row is None else self.record(**row)

    def put(self, connection: Connection, record: R, **more: object) -> None:
        """Store or replace; `more` sets columns that are not fields."""
        values = {**self.values(record), **more}
        changed = {name: value for name, value in values.items() if name != self.key}
        query = insert(connection, self.table).values(values)
        connection.execute(query.on_conflict_do_update(index_elements=[self.key], set_=changed))

    def add(self, connection: Connection, record: R, **more: object) -> R:
        """Keep the first record of a key, and return it."""
        query = insert(connection, self.table).values({**self.values(record), **more})
        connection.execute(query.on_conflict_do_nothing(index_elements=[self.key]))
        kept = self.get(connection, getattr(record, self.key))
        assert kept is not None  # no record is deleted as soon as it is made
        return kept

    def change(self, connection: Connection, key: str, **columns: object) -> None:
        """Set some columns of a record."""
        query = update(self.table).where(self.table.c[self.key] == key)
        connection.execute(query.values(columns))


SESSIONS = Kind(schema.sessions, "session_id", StoredSession)
MODELS = Kind(schema.models, "model_id", Model)
SAMPLERS = Kind(schema.samplers, "sampler_id", StoredSampler)
CHECKPOINTS = Kind(schema.checkpoints, "path", StoredCheckpoint)
LOSSES = Kind(schema.losses, "loss_id", StoredLoss)
KEYS = Kind(schema.api_keys, "key_hash", ApiKey)
AUDIT = Kind(schema.audit, "number", AuditEntry)
