"""Transactions that PostgreSQL undoes are run again, by a real deadlock and by its error codes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from tests.contracts.store_suite import session
from tests.patience import PATIENCE_S
from tinkex.errors import StorageError
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio

TABLE = "CREATE TABLE counted (name text PRIMARY KEY, value int NOT NULL)"
ROWS = "INSERT INTO counted VALUES ('a', 0), ('b', 0)"
ADD = "UPDATE counted SET value = value + 1 WHERE name = '{}'"
ALL = "SELECT name, value FROM counted ORDER BY name"


class Rival:
    """Another program: it locks `b`, and then waits for `a` until the deadlock is resolved."""

    def __init__(self, place: str) -> None:
        self._address = make_url(place).set(drivername="postgresql").render_as_string(False)
        self.pid = 0
        self.has_b = threading.Event()
        self.goes_on = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._address) as connection:
            self.pid = connection.info.backend_pid
            # The store's own check comes first, so that the store is the one that is undone.
            connection.execute("SET LOCAL deadlock_timeout = '1h'")
            connection.execute(ADD.format("b").encode())
            self.has_b.set()
            assert self.goes_on.wait(PATIENCE_S)
            connection.execute(ADD.format("a").encode())


def until_it_waits(connection: Connection, pid: int) -> None:
    """Until a backend waits for a lock."""
    waits = text("SELECT count(*), pg_sleep(0.01) FROM pg_locks WHERE pid = :pid AND NOT granted")
    for _ in range(round(PATIENCE_S / 0.01)):
        if connection.execute(waits, {"pid": pid}).scalar_one():
            return
    raise AssertionError("the other program never waited")


async def test_the_victim_of_a_deadlock_runs_again_and_is_done_once(
    postgres: PostgresServer,
) -> None:
    place = postgres.new_place()
    async with SqlStore.open(place) as store:
        await store._database.write(lambda c: [c.execute(text(each)) for each in (TABLE, ROWS)])
        rival, runs = Rival(place), []

        def both(connection: Connection) -> str:
            runs.append(len(runs))
            connection.execute(text("SET LOCAL deadlock_timeout = '10ms'"))
            connection.execute(text(ADD.format("a")))
            if len(runs) == 1:
                rival.goes_on.set()
                until_it_waits(connection, rival.pid)
            connection.execute(text(ADD.format("b")))
            return f"run {len(runs)}"

        other = asyncio.create_task(asyncio.to_thread(rival.run))
        assert await asyncio.to_thread(rival.has_b.wait, PATIENCE_S)
        assert await store._database.write(both) == "run 2"
        await other
        found = await store._database.read(lambda c: c.execute(text(ALL)).all())
        assert [tuple(row) for row in found] == [("a", 2), ("b", 2)]


def undone(code: str, times: int, runs: list[int]) -> Any:
    """Work that the database undoes some times, with an error of that code."""
    fail = f"DO $$ BEGIN RAISE EXCEPTION 'undone' USING ERRCODE = '{code}'; END $$"

    def do(connection: Connection) -> int:
        runs.append(len(runs))
        if len(runs) <= times:
            connection.exec_driver_sql(fail)
        return len(runs)

    return do


@pytest.mark.parametrize("code", ["40001", "40P01"])
async def test_work_that_is_undone_every_time_is_given_up_and_others_are_not(
    code: str, postgres: PostgresServer
) -> None:
    async with SqlStore.open(postgres.new_place()) as store:
        runs: list[int] = []
        assert await store._database.write(undone(code, 2, runs)) == 3
        runs.clear()
        failing = asyncio.create_task(store._database.write(undone(code, 1000, runs)))
        await asyncio.gather(*(store.put_session(session(f"s{n}")) for n in range(5)))
        with pytest.raises(StorageError, match="undid the transaction") as caught:
            await failing
        assert caught.value.retryable
        assert len(runs) <= 6  # in a group, and alone
        assert len(await store.sessions()) == 5


async def test_work_of_which_the_outcome_is_unknown_is_not_run_again(
    postgres: PostgresServer,
) -> None:
    async with SqlStore.open(postgres.new_place()) as store:
        runs: list[int] = []
        with pytest.raises(StorageError):
            await store._database.write(undone("40003", 1, runs))
        assert len(runs) == 1
