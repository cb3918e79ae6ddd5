"""Several nodes on one real PostgreSQL at the same moment: who wins, and who is refused."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from hashlib import md5
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from tests.contracts.ownership_suite import KEY, LEASE_S, Heard, node
from tests.contracts.store_suite import DONE, hour_of, model, session, step, used
from tests.patience import PATIENCE_S
from tinkex.errors import StorageError
from tinkex.server.store.ownership import ClaimLostError, LeaseLostError, NodeLoad
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sqlalchemy import Connection

    from tests.contracts.postgres import PostgresServer
    from tinkex.server.store.ownership import Claim

pytestmark = pytest.mark.anyio

EXPIRED_S = -1.0


@pytest.fixture
def place(postgres: PostgresServer) -> str:
    return postgres.new_place()


@pytest.fixture
async def joined(place: str) -> AsyncIterator[Callable[[str], Awaitable[SqlStore]]]:
    """Opens stores that have joined."""
    async with AsyncExitStack() as stack:

        async def join(name: str) -> SqlStore:
            store = await stack.enter_async_context(SqlStore.open(place))
            await store.join("c", node(name), LEASE_S)
            return store

        yield join


Joined = Any  # what the fixture yields


async def adopted(store: SqlStore, name: str, key: str = KEY) -> Claim:
    claim = await store.claim(key, f"{name}-1", owner="o", base_model="b")
    await store.adopt(claim)
    return claim


async def test_of_nodes_that_claim_a_key_at_once_one_gets_it(joined: Joined) -> None:
    stores = {name: await joined(name) for name in "abc"}
    keys = [f"k{number}" for number in range(20)]

    async def claim_all(name: str) -> list[Claim]:
        return [
            await stores[name].claim(key, f"{name}-1", owner="o", base_model="b") for key in keys
        ]

    answers = await asyncio.gather(*map(claim_all, stores))
    assert answers[0] == answers[1] == answers[2]
    assert {claim.epoch for claim in answers[0]} == {1}


async def test_of_nodes_that_take_over_a_key_at_once_one_gets_it(joined: Joined) -> None:
    dead, *others = [await joined(name) for name in "abc"]
    claims = [await adopted(dead, "a", f"k{number}") for number in range(20)]
    await dead.renew(EXPIRED_S, NodeLoad())

    async def take_all(store: SqlStore, name: str) -> set[str]:
        while not await store.declare_dead("a-1"):
            pass
        taken = [await store.reassign(claim, f"{name}-1") for claim in claims]
        return {claim.key for claim in taken if claim is not None}

    first, second = await asyncio.gather(*map(take_all, others, "bc"))
    assert not first & second
    assert len(first | second) == len(claims)
    assert {claim.epoch for claim in await dead.claims()} == {2}


async def test_a_write_is_before_the_declaration_or_refused(joined: Joined) -> None:
    slow, other = await joined("a"), await joined("b")
    await adopted(slow, "a")
    accepted: set[str] = set()
    stop = asyncio.Event()

    async def write(first: int) -> None:
        for seq in range(first, 100_000, 8):
            if stop.is_set():
                return
            try:
                operation, _ = await slow.submit(step(seq))
            except LeaseLostError:
                return
            accepted.add(operation.op_id)

    writers = [asyncio.create_task(write(first)) for first in range(8)]
    while len(accepted) < 50:
        await asyncio.wait(writers, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
    # As if its renewals were late.
    await slow.renew(EXPIRED_S, NodeLoad())
    async with asyncio.timeout(PATIENCE_S):
        while not await other.declare_dead("a-1"):
            pass
    seen = {op.op_id for op in await other.journal(KEY, -1)}
    stop.set()
    await asyncio.gather(*writers)
    assert accepted <= seen
    assert {op.op_id for op in await other.journal(KEY, -1)} == seen
    with pytest.raises(LeaseLostError):
        await slow.finish(next(iter(accepted)), DONE, 1.0)


async def test_all_writes_of_a_group_are_refused_and_reads_are_not(joined: Joined) -> None:
    late, other = await joined("a"), await joined("b")
    await late.put_session(session())
    await late.renew(EXPIRED_S, NodeLoad())
    assert await other.declare_dead("a-1")
    answers = await asyncio.gather(
        *(late.put_session(session(f"s{n}")) for n in range(5)),
        late.add_model(model()),
        late.open_models(),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [*[LeaseLostError] * 6, list]
    assert len(await other.sessions()) == 1


async def test_reads_of_a_node_hold_no_lock_of_its_writes(joined: Joined) -> None:
    store = await joined("a")
    ticket = text("SELECT pg_current_xact_id_if_assigned()::text")

    def transaction(connection: Connection) -> str | None:
        return connection.execute(ticket).scalar_one()

    database = store._database
    hold, held = threading.Event(), threading.Event()
    # Whatever is called while the first one runs waits together.
    first = asyncio.create_task(database.read(lambda _: (held.set(), hold.wait(PATIENCE_S))))
    assert await asyncio.to_thread(held.wait, PATIENCE_S)
    calls = [database.write, database.write, database.read, database.write_alone, database.write]
    waiting = [asyncio.create_task(call(transaction)) for call in calls]
    await asyncio.wait(waiting, timeout=0)
    hold.set()
    await first
    one, two, read, alone, last = [await task for task in waiting]
    assert one == two
    assert read is None
    assert len({one, alone, last}) == 3


async def test_a_process_frozen_in_a_transaction_does_not_stop_others(
    place: str, joined: Joined
) -> None:
    other = await joined("b")
    entered, tried, thaw = threading.Event(), threading.Event(), threading.Event()
    # As of a node with the shortest lease, but not before the other one has tried.
    impatient = text("SET LOCAL idle_in_transaction_session_timeout = '1s'")

    def freeze(connection: Connection) -> None:
        entered.set()
        assert tried.wait(PATIENCE_S)
        connection.execute(impatient)
        assert thaw.wait(PATIENCE_S)
        connection.execute(text("SELECT 1"))

    async with SqlStore.open(place) as frozen:
        await frozen.join("c", node("a"), LEASE_S)
        claim = await adopted(frozen, "a")
        await frozen.renew(EXPIRED_S, NodeLoad())
        writing = asyncio.create_task(frozen._database.write(freeze))
        try:
            assert await asyncio.to_thread(entered.wait, PATIENCE_S)
            # Each try gives up after a moment, so this node can write in between.
            assert not await other.declare_dead("a-1")
            await other.put_session(session())
            tried.set()
            async with asyncio.timeout(PATIENCE_S):
                while not await other.declare_dead("a-1"):
                    await other.renew(LEASE_S, NodeLoad())
            taken = await other.reassign(claim, "b-1")
            assert taken is not None
            await other.adopt(taken)
            assert (await other.submit(step(1)))[1]
        finally:
            tried.set()
            thaw.set()
        with pytest.raises(LeaseLostError):
            await writing


async def test_an_outcome_under_an_old_epoch_is_refused_by_the_database(joined: Joined) -> None:
    first, second = await joined("a"), await joined("b")
    claim = await adopted(first, "a")
    await first.submit(step(1))
    moved = await first.reassign(claim, "b-1")
    assert moved is not None
    # As if this node had not noticed.
    first._adopted[KEY] = claim.epoch
    for late in (
        first.finish(step(1).op_id, DONE, 1.0),
        first.submit(step(2)),
        first.trim_journal(KEY, 9),
        first.change_model(KEY, snapshot_seq=3),
    ):
        with pytest.raises(ClaimLostError):
            await late
    await second.adopt(moved)
    assert await second.finish(step(1).op_id, DONE, 1.0)
    query = text("SELECT epoch FROM operations")
    assert await second._database.read(lambda c: c.execute(query).scalars().all()) == [2]


def listening(place: str) -> str:
    """Which backends listen for the hints of a place."""
    channel = md5(place.rpartition("%3D")[2].encode()).hexdigest()
    return f"FROM pg_stat_activity WHERE query = 'LISTEN \"tinkex_{channel}\"'"


async def test_a_lost_connection_for_hints_comes_back_with_one_for_everything(
    place: str, joined: Joined, postgres: PostgresServer
) -> None:
    first, second = await joined("a"), await joined("b")
    await second.put_session(session())
    await first.put_session(session(project_id="p"))
    heard = Heard(second)
    await asyncio.to_thread(
        postgres.execute, f"SELECT pg_terminate_backend(pid) {listening(place)}"
    )
    await heard.until("all")
    assert await second.get_session("s") == session(project_id="p")
    # It hears what happens from now on.
    heard.clear()
    await first.put_session(session(project_id="q"))
    await heard.until("session s")
    assert await second.get_session("s") == session(project_id="q")


async def test_nothing_is_cached_while_no_hints_are_heard(joined: Joined) -> None:
    first, second = await joined("a"), await joined("b")
    await second.put_session(session())
    await second.stop_listening()
    while second._session_cache.get("s") is not None:
        await asyncio.wait([asyncio.create_task(second.nodes())])
    for project_id in ("p", "q"):
        await first.change_session("s", project_id=project_id)
        assert await second.get_session("s") == session(project_id=project_id)


async def test_usage_that_two_nodes_add_to_one_hour_counts_once(joined: Joined) -> None:
    stores = [await joined(name) for name in "ab"]
    for _ in range(3):
        for store in stores:
            await store.add_usage(used(4.0, "sample", prompt_tokens=1))
        await asyncio.gather(*(store._behind.write_usage() for store in stores))
    (found,) = await stores[0].usage("o", 0.0, 3600.0)
    assert found.usage == hour_of(0, "sample", prompt_tokens=6).usage


async def test_nodes_that_write_for_the_same_owners_all_get_through(joined: Joined) -> None:
    stores = [await joined(name) for name in "abc"]

    async def write(store: SqlStore, which: int) -> None:
        calls = [
            store.add_session(
                session(f"{which}-{number}", owner=f"o{(number * (which + 1)) % 5}"),
                max_sessions=100,
                max_kept_sessions=1000,
            )
            for number in range(40)
        ]
        assert await asyncio.gather(*calls) == [None] * 40
        for number in range(40):
            await store.touch_session(f"{which}-{number}", 9.0)
        await store._behind.flush()

    await asyncio.gather(*(write(store, which) for which, store in enumerate(stores)))
    assert await stores[0].count_sessions() == 120


async def test_a_server_and_nodes_exclude_each_other(place: str) -> None:
    async with SqlStore.open(place) as first, SqlStore.open(place) as second:
        await first.join("c", node("a"), LEASE_S)
        with pytest.raises(StorageError, match="nodes of a cluster") as caught:
            await second.lock()
        assert not caught.value.retryable
        await second.join("c", node("b"), LEASE_S)
    async with SqlStore.open(place) as first, SqlStore.open(place) as second:
        await first.lock()
        with pytest.raises(StorageError, match="no node of a cluster") as caught:
            await second.join("c", node("b"), LEASE_S)
        assert not caught.value.retryable


async def test_a_node_that_reconnects_is_still_a_node(place: str, joined: Joined) -> None:
    first = await joined("a")
    end_us = text("SELECT pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(StorageError):
        await first._database.write(lambda c: c.execute(end_us) and None)
    await first.put_session(session())
    idle = text("SHOW idle_in_transaction_session_timeout")
    assert await first._database.read(lambda c: c.execute(idle).scalar_one()) == "1h"
    async with SqlStore.open(place) as server:
        with pytest.raises(StorageError, match="nodes of a cluster"):
            await server.lock()
