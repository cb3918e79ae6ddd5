"""The store that remembers across restarts.

One process owns it (`lock`), so what was read or written once may be answered from memory:
sessions, models, samplers, and every operation that is not finished. Payloads of finished
operations are in the database; memory holds the most recent ones only.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from sqlalchemy import URL, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError

from tinkex.clock import SystemClock
from tinkex.errors import InputError, StorageError
from tinkex.server.store.audit_file import AuditFile
from tinkex.server.store.sql.database import Database
from tinkex.server.store.sql.kept import triggers
from tinkex.server.store.sql.ledger import LedgerQueries, PruningQueries
from tinkex.server.store.sql.models import ModelQueries
from tinkex.server.store.sql.operations import OperationQueries
from tinkex.server.store.sql.ownership import OwnershipQueries, living_nodes
from tinkex.server.store.sql.schema import METADATA, VERSION, version
from tinkex.server.store.sql.sessions import SamplerQueries, SessionQueries
from tinkex.server.store.sql.write_behind import WriteBehind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Self

    from sqlalchemy import Connection

    from tinkex.clock import Clock
    from tinkex.server.store.sql.database import DatabaseDriver

_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}
MIGRATIONS = Path(__file__).parent / "migrations"


class SqlStore(
    SessionQueries,
    ModelQueries,
    SamplerQueries,
    OperationQueries,
    LedgerQueries,
    PruningQueries,
    OwnershipQueries,
):
    """A `Store` in SQLite or PostgreSQL. Used from the event loop it was opened on."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str | Path, *, clock: Clock | None = None, audit_file: Path | None = None
    ) -> AsyncGenerator[Self]:
        """The store at `sqlite:///PATH`, a plain path, or `postgresql://…`; made when new.

        The audit log is copied to `audit_file`, if one is named. Raises `StorageError` when the
        store cannot be opened, or was made by a newer version.
        """
        driver = _driver(url)
        database = Database(driver, _driver(url))
        copy = None if audit_file is None else AuditFile(audit_file)
        clock = clock or SystemClock()
        behind = WriteBehind(database, clock, copy)
        database.start()
        store = cls(database, behind)
        try:
            await database.write(lambda c: bring_up(c, driver.shown, clock))
            async with behind.running():
                yield store
        finally:
            with anyio.CancelScope(shield=True):
                await store.stop_listening()
                await database.close()

    @property
    def place(self) -> str:
        """Where it is, without a password."""
        return self._database.driver.shown

    async def lock(self) -> None:
        """Become the store's one server until it is closed, or raise `StorageError`."""
        await self._database.write(self._database.driver.lock)


def _driver(url: str | Path) -> DatabaseDriver:
    parsed = parse(url)
    if parsed.drivername.startswith("sqlite"):
        from tinkex.server.store.sql.sqlite import Sqlite

        return Sqlite(parsed)
    from tinkex.server.store.sql.postgres import Postgres

    return Postgres(parsed)


def parse(url: str | Path) -> URL:
    """The database's address; a plain path is a SQLite file."""
    text = str(url)
    if "://" not in text:
        return URL.create(_DRIVERS["sqlite"], database=str(Path(text).absolute()))
    try:
        parsed = make_url(text)
    except ArgumentError:
        raise InputError("not a database URL", "database") from None
    driver = _DRIVERS.get(parsed.drivername.partition("+")[0])
    if driver is None:
        raise InputError(
            f"{parsed.drivername!r} is no database we know; use sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME",
            "database",
        )
    if driver == _DRIVERS["sqlite"] and parsed.database in (None, "", ":memory:"):
        raise InputError("sqlite:///PATH needs the path of a file", "database")
    if driver == _DRIVERS["sqlite"]:
        parsed = parsed.set(database=str(Path(str(parsed.database)).absolute()))
    return parsed.set(drivername=driver)


def bring_up(connection: Connection, place: str, clock: Clock | None = None) -> None:
    """Bring the database to today's schema, or raise why that is impossible."""
    if connection.dialect.name == "postgresql":
        # Of two programs that open a new database, one waits.
        connection.execute(text("SELECT pg_advisory_xact_lock(1953918571, 0)"))
    found = _found(connection)
    if found == VERSION:
        return
    if found is None:
        _create(connection, place)
    elif found > VERSION:
        raise _refused(
            f"The store at {place} was written by a newer tinkex (schema {found}, this one knows "
            f"{VERSION}). Install that version, or give this one another store.",
            place,
        )
    else:
        alive = living_nodes(connection, (clock or SystemClock()).wall())
        if alive:
            raise _refused(
                f"The store at {place} has schema {found} and this tinkex needs {VERSION}, but "
                f"nodes of the older version are running: {', '.join(alive)}. End them all first.",
                place,
            )
        migrate(connection)


def migrate(connection: Connection, to: str = "head") -> None:
    """Run the migrations that the database lacks."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def _found(connection: Connection) -> str | None:
    if not inspect(connection).has_table(version.name):
        return None
    return connection.execute(select(version.c.version_num)).scalar_one_or_none()


def _create(connection: Connection, place: str) -> None:
    foreign = sorted(set(inspect(connection).get_table_names()) & set(METADATA.tables))
    if foreign:
        raise _refused(
            f"The database at {place} has tables of another program ({', '.join(foreign)}). Give "
            "tinkex a database of its own.",
            place,
        )
    METADATA.create_all(connection, checkfirst=False)
    for statement in triggers(connection.dialect.name):
        connection.exec_driver_sql(statement)
    connection.execute(version.insert().values(version_num=VERSION))


def _refused(message: str, place: str) -> StorageError:
    error = StorageError(message, place)
    error.retryable = False
    return error
