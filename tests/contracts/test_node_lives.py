"""One node on SQLite, nodes of other versions, and copies of records on a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from tests.contracts.ownership_suite import KEY, LEASE_S, node
from tests.contracts.store_suite import DONE, step
from tests.contracts.test_store_versions import run
from tinkex.errors import StorageError
from tinkex.server.store.ownership import NodeLoad
from tinkex.server.store.sql import SqlStore
from tinkex.server.store.sql.state import OLDEST_S, SharedCache
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.new_place()
    return str(tmp_path / "store.db")


async def test_sqlite_has_one_node(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with SqlStore.open(path) as first, SqlStore.open(path) as second:
        await first.join("c", node("a"), LEASE_S)
        with pytest.raises(StorageError, match="PostgreSQL") as caught:
            await second.join("c", node("b"), LEASE_S)
        assert not caught.value.retryable
        with pytest.raises(StorageError, match="in use by another server"):
            await second.lock()


async def test_a_node_that_starts_again_takes_over_what_it_had(place: str) -> None:
    async with SqlStore.open(place) as store:
        await store.join("c", node("a"), 0.0)
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        await store.adopt(claim)
        await store.submit(step(1, body=b"one"))
        await store.finish(step(1).op_id, DONE, 1.0)
        await store.submit(step(2, body=b"two"))
    # It ended without a word.
    async with SqlStore.open(place) as store:
        again = node("b")
        assert (await store.join("c", again, LEASE_S)).alone
        assert await store.pending() == []
        assert await store.declare_dead("a-1")
        taken = await store.reassign(claim, "b-1")
        assert taken is not None
        await store.adopt(taken)
        assert [op.body for op in await store.pending()] == [b"two"]


async def test_leases_on_sqlite_go_by_the_clock_of_the_store(tmp_path: Path) -> None:
    clock = FakeClock()
    async with SqlStore.open(tmp_path / "store.db", clock=clock) as store:
        membership = await store.join("c", node("a"), 10.0)
        assert membership.now == clock.wall()
        await clock.advance(9.0)
        assert [n.expired for n in await store.nodes()] == [False]
        await clock.advance(2.0)
        assert [n.expired for n in await store.nodes()] == [True]
        assert await store.renew(10.0, NodeLoad()) == clock.wall()


async def test_no_migration_while_nodes_of_the_older_version_are_alive(place: str) -> None:
    async with SqlStore.open(place) as store:
        await store.join("c", node("a"), LEASE_S)
    run(place, lambda c: c.execute(text("UPDATE schema_version SET version_num = '0004'")))
    with pytest.raises(StorageError, match="older version are running: a"):
        async with SqlStore.open(place):
            pass
    run(place, lambda c: c.execute(text("UPDATE nodes SET state = 'left'")))
    # Nothing is in the way now, except that this schema has the newest tables already.
    with pytest.raises(Exception, match=r"already exists|duplicate column"):
        async with SqlStore.open(place):
            pass


async def test_a_copy_is_not_kept_over_a_hint_that_came_before_it() -> None:
    cache, clock = SharedCache[str](10), FakeClock()
    cache.put("k", "plain")
    await clock.advance(100 * OLDEST_S)
    assert cache.get("k") == "plain"
    cache.share(clock)
    cache.put("k", "not heard")
    assert cache.get("k") is None
    cache.hear(True)
    before = cache.version
    cache.invalidate("k")
    cache.put("k", "read before the hint", before)
    assert cache.get("k") is None
    cache.put("k", "new", cache.version)
    assert cache.get("k") == "new"


async def test_a_copy_is_read_again_after_a_while_however_often_it_is_amended() -> None:
    cache, clock = SharedCache[str](10), FakeClock()
    cache.share(clock)
    cache.hear(True)
    cache.amend("unknown", "x")
    assert cache.get("unknown") is None
    cache.put("k", "read")
    for _ in range(4):
        await clock.advance(OLDEST_S / 4)
        cache.amend("k", "amended")
        assert cache.get("k") == "amended"
    await clock.advance(OLDEST_S / 4)
    assert cache.get("k") is None
