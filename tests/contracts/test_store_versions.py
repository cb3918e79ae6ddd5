"""The schema of an opened database: the same however it came to be, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tests.contracts.first_schema import create_first_schema
from tinkex.errors import StorageError
from tinkex.server.store.sql import SqlStore
from tinkex.server.store.sql.schema import METADATA, VERSION
from tinkex.server.store.sql.store import MIGRATIONS, bring_up, migrate, parse

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


def migrated_from_first(connection: Connection, to: str = "head") -> None:
    """A database of the first version, brought up to another."""
    create_first_schema(connection)
    migrate(connection, to)


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
    run(migrated, migrated_from_first)
    run(fresh, lambda c: bring_up(c, "here"))
    shape = run(fresh, schema_of)
    assert shape.keys() == METADATA.tables.keys()
    assert run(migrated, schema_of) == shape
    versions = [run(p, lambda c: c.execute(text("SELECT * FROM schema_version")).all()) for p in
                (migrated, fresh)]  # fmt: skip
    assert versions == [[(VERSION,)], [(VERSION,)]]


COLUMNS = {
    "sessions": "session_id, owner, created_at, last_seen_at, sdk_version, tags, user_metadata, "
    "heartbeats, status, active",
    "models": "model_id, session_id, snapshot_location, snapshot_seq, owner, base_model, lora, "
    "optimizer, created_at, last_request_at, user_metadata, corrupted",
    "samplers": "sampler_id, session_id, snapshot, location, model_id, owner, base_model, "
    "created_at, copies",
    "operations": "op_id, model_id, kind, owner, session_id, created_at, media, seq_id, clone, "
    "sequence_ids, state, finished_at",
    "checkpoints": "path, model_id, owner, kind, name, location, base_model, lora, optimizer, "
    "has_optimizer, created_at, size_bytes, public",
    "answers": "owner, key, answer",
}


def fill(connection: Connection, table: str, *rows: str) -> None:
    """Insert rows, written as SQL, into the columns that an earlier version had to give."""
    for row in rows:
        connection.exec_driver_sql(f"INSERT INTO {table} ({COLUMNS[table]}) VALUES ({row})")


def old_store(connection: Connection) -> None:
    """What version 0002 left behind: a session that goes on and one that is over."""
    migrated_from_first(connection, "0002")
    session = "'o', 1, 2, '', '[]', '{}', TRUE"
    active, cancelled = """'{"type": "active"}'""", """'{"type": "cancelled", "detail": "x"}'"""
    fill(
        connection,
        "sessions",
        f"'on', {session}, {active}, TRUE",
        f"'over', {session}, {cancelled}, FALSE",
    )
    shape = """'o', 'b', '{"rank": 8}', '{"type": "adam"}', 1, 1, '{}', FALSE"""
    fill(
        connection,
        "models",
        f"'on:train:0', 'on', NULL, -1, {shape}",
        f"'on:train:1', 'on', NULL, -1, {shape}",
        f"'on:train:2', 'on', NULL, -1, {shape}",
        f"'on:train:3', 'on', NULL, 7, {shape}",
        f"'import-1:train:0', 'import-1', NULL, -1, {shape}",
    )
    fill(
        connection,
        "operations",
        "'on:train:0:0', 'on:train:0', 'create_model', 'o', 'on', 1, '', 0, 0, '[]', 'done', 2",
    )
    fill(
        connection,
        "checkpoints",
        """'tinker://copy', 'on:train:2', 'o', 'weights', 'n', 'l', 'b', '{"rank": 8}',
        '{"type": "adam"}', TRUE, 1, 7, FALSE""",
    )
    fill(
        connection,
        "samplers",
        "'on:sample:0', 'on', 'a', NULL, 'on:train:0', 'o', 'b', 1, 3",
        "'on:sample:1', 'on', 'b', NULL, 'on:train:3', 'o', 'b', 1, 0",
        "'over:sample:0', 'over', 'c', NULL, 'over:train:0', 'o', 'b', 1, 0",
        "'over:sample:1', 'over', NULL, 'somewhere', NULL, 'o', 'b', 1, 0",
        "'over:sample:2', 'over', 'd', 'file', NULL, 'o', 'b', 1, 0",
    )
    fill(
        connection,
        "answers",
        "'o', 'samples:on:sample:0:1', '256'",
        "'o', 'stainless-1', 'on:train:0:0'",
    )


@pytest.mark.anyio
async def test_an_older_store_is_kept_and_what_ended_in_it_is_marked(
    new_place: Callable[[], str],
) -> None:
    place = new_place()
    run(place, old_store)
    async with SqlStore.open(place) as store:
        # One that ran, and one whose first operation is still on its way. Of the others one was
        # copied, one imported, one unloaded: they are listed, and nothing runs in them.
        assert [m.model_id for m in await store.open_models()] == ["on:train:0", "on:train:1"]
        assert len(await store.models()) == 5
        assert await store.samplers(unsaved=True) == (await store.samplers("on"))[:1]
        dropped = {s.sampler_id: (s.dropped, s.location) for s in await store.samplers()}
        over = "its session is over"
        assert dropped == {
            "on:sample:0": (None, None),
            "on:sample:1": ("its model was unloaded", None),
            "over:sample:0": (over, None),
            "over:sample:1": (over, None),
            # Its file is still to be deleted.
            "over:sample:2": (over, "file"),
        }
        assert await store.join_sampler("on:sample:0") == 4
        assert await store.recall("o", "samples:on:sample:0:1") == "256"
        assert [s.session_id for s in await store.sessions(active=True)] == ["on"]
    found = run(
        place, lambda c: c.execute(text("SELECT session_id, created_at FROM answers")).all()
    )
    assert {row[0] for row in found} == {"on", None}
    assert min(row[1] for row in found) > 0


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
