"""What the durable store keeps in memory, and what it writes a little later."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.store_suite import DONE, key, sample, session, step, used
from tinkex.server.store.records import OperationOutcome, changed
from tinkex.server.store.sql import SqlStore
from tinkex.server.store.sql.overflow import ROOM_BYTES
from tinkex.server.store.sql.write_behind import SEEN_EVERY_S, USAGE_EVERY_S
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def rows(path: Path, query: str) -> list[Any]:
    """What another program sees."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


async def test_signs_of_life_and_sample_usage_are_written_soon(tmp_path: Path) -> None:
    path, clock = tmp_path / "store.db", FakeClock()
    async with SqlStore.open(path, clock=clock) as store:
        await store.put_session(session())
        for at in (5.0, 6.0):
            await store.touch_session("s", at)
            await store.add_usage(used(at, "sample", prompt_tokens=1))
        assert rows(path, "SELECT prompt_tokens FROM usage") == []
        await clock.advance(USAGE_EVERY_S)
        await store.get_session("x")  # waits for what is being written
        assert rows(path, "SELECT prompt_tokens FROM usage") == [(2,)]
        assert rows(path, "SELECT last_seen_at FROM sessions") == [(1.0,)]
        await clock.advance(SEEN_EVERY_S)
        await store.get_session("x")
        assert rows(path, "SELECT last_seen_at FROM sessions") == [(6.0,)]


async def test_heartbeats_write_nothing_by_themselves(tmp_path: Path) -> None:
    path, clock = tmp_path / "store.db", FakeClock()
    async with SqlStore.open(path, clock=clock) as store:
        for number in range(20):
            await store.put_session(session(str(number)))
        with closing(sqlite3.connect(path)) as watching:
            # A number that changes with every commit of somebody else.
            version = watching.execute("PRAGMA data_version").fetchone()
            for number in range(20):
                await store.touch_session(str(number), 9.0)
            await store.sessions()
            assert watching.execute("PRAGMA data_version").fetchone() == version
        assert await store.get_session("7") == session("7", last_seen_at=9.0)
        assert {s.last_seen_at for s in await store.sessions()} == {9.0}


async def test_results_of_finished_operations_are_not_held_in_memory(tmp_path: Path) -> None:
    large = OperationOutcome(body=b"x" * 1_000_000, size_bytes=1_000_000)
    async with SqlStore.open(tmp_path / "store.db") as store:
        for seq in range(40):
            await store.submit(step(seq, body=b"y" * 1000))
            await store.finish(f"s:train:0:{seq}", large, 1.0)
        held = [op for _, op in store._finished.items()]
        assert sum(len(op.outcome.body or b"") for op in held if op.outcome) <= 16 << 20
        assert all(op.body == b"" for op in held)
        assert store._open == {}
        first = await store.get_operation("s:train:0:0")
        assert first is not None
        assert first.outcome == large


async def test_results_of_samples_beyond_memory_are_kept_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    large = OperationOutcome(body=b"x" * (ROOM_BYTES // 4), size_bytes=ROOM_BYTES // 4)
    async with SqlStore.open(path) as store:
        for seq in range(6):
            await store.submit(sample(seq))
            assert await store.finish(sample(seq).op_id, large, float(seq))
        assert not await store.finish(sample(5).op_id, large, 9.0)
        assert store._samples.result_bytes == ROOM_BYTES
        for seq in range(6):
            found = await store.get_operation(sample(seq).op_id)
            assert found is not None
            assert found.outcome == large
        assert len((await store.completions("s:sample:0", 0, 0))[0]) == 6
        await store.drop_results([sample(5).op_id, sample(0).op_id])
        dropped = await store.get_operation(sample(5).op_id)
        assert dropped is not None
        assert dropped.outcome == changed(large, body=None)
        assert await store.drop_results_before(4.5) == 4
        assert await store.forget_operations_before(9.0) == 6
        assert rows(path, "SELECT count(*) FROM results") == [(0,)]


async def test_what_samples_left_on_disk_is_gone_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    large = OperationOutcome(body=b"x" * (ROOM_BYTES + 1), size_bytes=ROOM_BYTES + 1)
    async with SqlStore.open(path) as store:
        await store.submit(sample(1))
        await store.finish(sample(1).op_id, large, 1.0)
    assert rows(path, "SELECT count(*) FROM results") == [(1,)]
    async with SqlStore.open(path) as store:
        assert await store.keys() == []
        # A command beside the server leaves it alone; the next server does not.
        assert rows(path, "SELECT count(*) FROM results") == [(1,)]
        await store.pending()
        assert rows(path, "SELECT count(*) FROM results") == [(0,)]


async def test_a_key_that_another_program_revokes_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with SqlStore.open(path) as store, SqlStore.open(path) as command:
        added = await command.add_key(key())
        assert await store.find_key(added.key_hash) == added
        await command.revoke_key(added.key_id, 9.0)
        assert await store.find_key(added.key_hash) == replace(added, revoked_at=9.0)


async def test_an_operation_written_in_a_moment_nobody_was_told_of_is_new(tmp_path: Path) -> None:
    async with SqlStore.open(tmp_path / "store.db") as store:
        await store.pending()
        async with SqlStore.open(tmp_path / "store.db") as lost:
            await lost.submit(step(1, body=b"body"))
            await lost.submit(step(2, body=b"body"))
            await lost.finish(step(2).op_id, DONE, 1.0)
        found, new = await store.submit(step(1, body=b"body"))
        assert (found.body, new) == (b"body", True)
        assert [op.seq_id for op in await store.pending()] == [1]
        assert not (await store.submit(step(2)))[1]


async def test_only_what_cannot_be_done_again_waits_for_the_disk(tmp_path: Path) -> None:
    async with SqlStore.open(tmp_path / "store.db") as store:

        async def waits_for_the_disk() -> bool:
            query = "PRAGMA synchronous"
            found = await store._database.read(lambda c: c.exec_driver_sql(query).scalar_one())
            return {1: False, 2: True}[found]

        await store.submit(step(1))
        assert await waits_for_the_disk()
        await store.finish(step(1).op_id, DONE, 1.0)
        assert not await waits_for_the_disk()
        await store.submit(step(2))
        await store.finish(step(2).op_id, OperationOutcome(error="withdrawn"), 1.0)
        assert await waits_for_the_disk()
