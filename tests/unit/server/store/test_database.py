"""The thread that owns the connection: order, shared commits, and whose failure is whose."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from tinkex.errors import ClosedError
from tinkex.server.store.sql.database import Database
from tinkex.server.store.sql.sqlite import Sqlite
from tinkex.server.store.sql.store import parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from sqlalchemy import Connection

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Database]:
    database = Database(*(Sqlite(parse(folder / "numbers.db")) for _ in range(2)))
    database.start()
    try:
        await database.write(run("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        yield database
    finally:
        await database.close()


def run(statement: str) -> Callable[[Connection], None]:
    return lambda connection: connection.execute(text(statement)) and None


def add(number: int) -> Callable[[Connection], int]:
    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})
        return number

    return work


def numbers(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars())


async def test_calls_that_wait_together_share_a_commit_and_keep_their_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        commits: list[object] = []
        event.listen(database.driver.engine, "commit", commits.append)
        order: list[int] = []
        await asyncio.gather(*(database.write(add(n), order.append) for n in range(200)))
        assert order == list(range(200))
        # The first may go alone while the others arrive; how they fall into groups is chance.
        assert len(commits) < 100


async def test_a_read_sees_the_writes_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        _, before, _ = await asyncio.gather(
            database.write(add(1)), database.read(numbers), database.write(add(2))
        )
        assert before == [1]


async def test_a_call_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:

        def half_done(connection: Connection) -> None:
            add(99)(connection)
            raise LookupError("in the middle")

        answers: list[Any] = await asyncio.gather(
            database.write(add(1)),
            database.write(half_done),
            database.write(add(2)),
            database.read(numbers),
            return_exceptions=True,
        )
        assert isinstance(answers[1], LookupError)
        assert [answers[0], answers[2], answers[3]] == [1, 2, [1, 2]]


async def test_what_follows_a_commit_follows_it_even_when_nobody_waits(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        noted: list[int] = []
        waiting = asyncio.create_task(database.write(add(1), noted.append))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        assert await database.read(numbers) == [1]
        assert noted == [1]


async def test_closing_does_what_waits_and_then_refuses(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        waiting = [asyncio.create_task(database.write(add(n))) for n in range(20)]
        await asyncio.wait(waiting, timeout=0)
        await database.close()
        assert [await task for task in waiting] == list(range(20))
        with pytest.raises(ClosedError):
            await database.read(numbers)


async def test_a_closed_store_is_one_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        await database.write(add(1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["numbers.db"]  # noqa: ASYNC240
