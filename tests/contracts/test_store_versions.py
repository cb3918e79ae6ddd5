"""The schema of an opened database: the same however it came to be, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tinkex.errors import StorageError
from tinkex.server.store.sql import SqlStore
from tinkex.server.store.sql.address import parse
from tinkex.server.store.sql.schema import METADATA, VERSION
from tinkex.server.store.sql.versions import MIGRATIONS, bring_up, migrate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy import Connection

    from tests.contracts.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes places for stores, each of them empty."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.new_place
    names = iter("abc")
    return lambda: str(tmp_path / f"{next(names)}.db")


def run(place: str, work: Callable[[Connection], Any]) -> Any:
    with create_engine(parse(place), poolclass=NullPool).begin() as connection:
        return work(connection)


def schema_of(connection: Connection) -> dict[str, Any]:
    """Everything the database itself says about its tables."""
    found = inspect(connection)
    return {
        name: {
            "columns": [{**c, "type": str(c["type"])} for c in found.get_columns(name)],
            "key": found.get_pk_constraint(name),
            "unique": sorted(map(str, found.get_unique_constraints(name))),
            "indexes": sorted(
                str({**i, "dialect_options": {k: str(v) for k, v in i["dialect_options"].items()}})
                for i in found.get_indexes(name)
            ),
        }
        for name in found.get_table_names()
    }


def test_migrating_gives_the_schema_of_a_new_database(new_place: Callable[[], str]) -> None:
    migrated, fresh = new_place(), new_place()
    run(migrated, migrate)
    run(fresh, lambda c: bring_up(c, "here"))
    shape = run(fresh, schema_of)
    assert shape.keys() == METADATA.tables.keys()
    assert run(migrated, schema_of) == shape
    versions = [run(p, lambda c: c.execute(text("SELECT * FROM schema_version")).all()) for p in
                (migrated, fresh)]  # fmt: skip
    assert versions == [[(VERSION,)], [(VERSION,)]]


def test_the_newest_migration_is_the_version_of_the_schema() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [VERSION]


@pytest.mark.anyio
async def test_a_database_of_a_newer_version_is_refused(new_place: Callable[[], str]) -> None:
    place = new_place()
    async with SqlStore.open(place):
        pass
    run(place, lambda c: c.execute(text("UPDATE schema_version SET version_num = '9999'")))
    with pytest.raises(StorageError, match="written by a newer tinkex") as caught:
        async with SqlStore.open(place):
            pass
    assert not caught.value.retryable
    tables = run(place, lambda c: inspect(c).get_table_names())
    assert set(tables) == set(METADATA.tables)


@pytest.mark.anyio
async def test_a_database_of_another_program_is_refused(new_place: Callable[[], str]) -> None:
    place = new_place()
    run(place, lambda c: c.execute(text("CREATE TABLE sessions (id TEXT)")))
    with pytest.raises(StorageError, match=r"tables of another program \(sessions\)"):
        async with SqlStore.open(place):
            pass
    assert run(place, lambda c: inspect(c).get_table_names()) == ["sessions"]


@pytest.mark.anyio
async def test_one_server_at_a_time_has_a_store(new_place: Callable[[], str]) -> None:
    place = new_place()
    async with SqlStore.open(place) as first:
        await first.lock()
        async with SqlStore.open(place) as second:
            with pytest.raises(StorageError, match="in use by another server") as caught:
                await second.lock()
            assert not caught.value.retryable
            # Beside a server, a command may still look after keys.
            assert await second.keys() == []
    async with SqlStore.open(place) as third:
        await third.lock()
