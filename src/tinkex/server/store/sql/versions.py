"""The schema of an opened database: made when it is new, migrated when it is old.

A new database gets today's tables at once, and Alembic is imported only when there is
something to migrate. A test compares the two ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import inspect, select, text

from tinkex.errors import StorageError
from tinkex.server.store.sql.schema import METADATA, VERSION, version

if TYPE_CHECKING:
    from sqlalchemy import Connection

MIGRATIONS = Path(__file__).parent / "migrations"


def bring_up(connection: Connection, place: str) -> None:
    """Give the database today's schema, or say why that cannot be."""
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
    connection.execute(version.insert().values(version_num=VERSION))


def _refused(message: str, place: str) -> StorageError:
    error = StorageError(message, place)
    error.retryable = False
    return error
