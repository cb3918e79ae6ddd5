"""Connections to PostgreSQL that break: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from sqlalchemy import text

from tests.contracts.lossy_proxy import LossyProxy
from tests.contracts.postgres import postgres_server
from tests.contracts.store_suite import DONE, hour_of, sampler, session, step, used
from tests.patience import PATIENCE_S
from tinkex.errors import StorageError
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contracts.lossy_proxy import Loss
    from tests.contracts.postgres import PostgresServer
    from tinkex.server.store.sql.postgres import Postgres

pytestmark = pytest.mark.anyio

PATIENCE_MS = round(1000 * PATIENCE_S)
END_OTHERS = (
    f"SELECT pg_terminate_backend(pid, {PATIENCE_MS}) FROM pg_stat_activity "
    "WHERE application_name = 'tinkex' AND pid <> pg_backend_pid()"
)


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[LossyProxy]:
    with (
        tempfile.TemporaryDirectory(prefix="tinkex-proxy-") as folder,
        LossyProxy(Path(folder), postgres.socket_folder) as proxy,
    ):
        yield proxy


def through(proxy: LossyProxy, place: str, postgres: PostgresServer) -> str:
    """The address of the same place by way of the proxy."""
    return place.replace(postgres.socket_folder, str(proxy.folder))


@pytest.mark.parametrize("loss", ["before the commit", "after the commit"])
async def test_a_commit_whose_answer_is_lost_takes_place_once(
    loss: Loss, proxy: LossyProxy, postgres: PostgresServer
) -> None:
    place = postgres.new_place()
    async with SqlStore.open(through(proxy, place, postgres)) as store:
        await store.lock()
        await store.add_sampler(sampler())
        proxy.next_loss = loss
        assert await store.join_sampler("s:sample:0") == 1
        proxy.next_loss = loss
        assert (await store.submit(step(1, body=b"body")))[1]
        proxy.next_loss = loss
        assert await store.finish("s:train:0:1", DONE, 4.0, used(4.0, trained_tokens=3))
        assert proxy.losses == 3
        assert await store.join_sampler("s:sample:0") == 2
        assert await store.usage("o", 0.0, 3600.0) == [hour_of(0, trained_tokens=3)]
        # It is still the one server.
        async with SqlStore.open(place) as other:
            with pytest.raises(StorageError, match="in use by another server"):
                await other.lock()
    async with SqlStore.open(place) as store:
        (kept,) = await store.journal("s:train:0", -1)
        assert (kept.body, kept.state) == (b"body", "done")


async def test_backends_that_are_ended_again_and_again_lose_nothing(
    postgres: PostgresServer,
) -> None:
    place = postgres.new_place()
    name = place.rpartition("%3D")[2]
    ours = f"SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND objid = hashtext('{name}')::oid"  # noqa: E501
    async with SqlStore.open(place) as store:
        await store.lock()
        for first in range(0, 100, 20):
            burst = [step(seq, body=b"%d" % seq) for seq in range(first, first + 20)]
            answers, _ = await asyncio.gather(
                asyncio.gather(*(store.submit(op) for op in burst)),
                asyncio.to_thread(postgres.execute, ours),
            )
            assert [new for _, new in answers] == [True] * 20
    async with SqlStore.open(place) as store:
        assert [op.seq_id for op in await store.pending()] == list(range(100))


async def test_a_server_that_restarts_is_waited_for_and_one_that_is_gone_is_not() -> None:
    with postgres_server() as server:
        place = server.new_place()
        async with SqlStore.open(place) as store:
            await store.lock()
            await store.put_session(session())
            driver = cast("Postgres", store._database.driver)
            driver.patience_s = PATIENCE_S
            await asyncio.to_thread(server.stop)
            waiting = asyncio.create_task(store.submit(step(1, body=b"body")))
            await asyncio.to_thread(server.start)
            assert (await waiting)[1]

            await asyncio.to_thread(server.stop)
            driver.patience_s = 0.0
            with pytest.raises(StorageError, match="running and reachable") as caught:
                await store.submit(step(2))
            assert caught.value.retryable
            # What is in memory is still known.
            assert [op.seq_id for op in await store.pending()] == [1]
            await asyncio.to_thread(server.start)
            assert (await store.submit(step(2)))[1]


async def test_a_lost_connection_finds_another_server_in_its_place(
    postgres: PostgresServer, proxy: LossyProxy
) -> None:
    place = postgres.new_place()
    async with (
        SqlStore.open(through(proxy, place, postgres)) as store,
        SqlStore.open(place) as other,
    ):
        await store.lock()
        cast("Postgres", store._database.driver).patience_s = 0.0
        pid = await store._database.read(
            lambda c: c.execute(text("SELECT pg_backend_pid()")).scalar_one()
        )
        end = f"SELECT pg_terminate_backend({pid}, {PATIENCE_MS})"
        await asyncio.to_thread(postgres.execute, end)
        await other.lock()
        with pytest.raises(StorageError, match="in use by another server"):
            await store.submit(step(1))
        assert await other.pending() == []


async def test_a_server_that_is_read_only_for_a_while_accepts_nothing_and_comes_back() -> None:
    with postgres_server() as server:
        place = server.new_place()
        async with SqlStore.open(place) as store:
            await store.lock()
            assert (await store.submit(step(1, body=b"one")))[1]
            # As after a failover to a replica: new connections may read only.
            server.execute("ALTER ROLE CURRENT_USER SET default_transaction_read_only = on")
            server.execute(END_OTHERS)
            with pytest.raises(StorageError, match="connect to the primary") as caught:
                await store.submit(step(2, body=b"two"))
            assert caught.value.out_of_reach
            assert caught.value.retryable
            with pytest.raises(StorageError):
                await store.probe(1000)
            assert await store.count_sessions() == 0  # reading still works
            server.execute(
                "BEGIN READ WRITE; ALTER ROLE CURRENT_USER RESET default_transaction_read_only; "
                "COMMIT"
            )
            # By itself: nobody ends the connection that may read only.
            assert (await store.submit(step(2, body=b"two")))[1]
            assert not (await store.submit(step(1, body=b"one")))[1]
            await store.probe(1000)
        async with SqlStore.open(place) as store:
            assert [op.body for op in await store.pending()] == [b"one", b"two"]


async def test_a_restart_between_statements_is_noticed_by_neither_writes_nor_listings() -> None:
    with postgres_server() as server:
        place = server.new_place()
        async with SqlStore.open(place) as store:
            await store.lock()
            for number in range(3):
                await store.put_session(session(f"s{number}", at=float(number)))
                assert len(await store.sessions("o")) == number + 1
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
            assert await store.session_ids("o", 0, 9) == ["s2", "s1", "s0"]
            assert (await store.kept("o"))["sessions"].count == 3


@pytest.mark.parametrize("loss", ["before the commit", "after the commit"])
async def test_a_lost_commit_counts_once_in_what_is_kept(
    loss: Loss, proxy: LossyProxy, postgres: PostgresServer
) -> None:
    place = postgres.new_place()
    async with SqlStore.open(through(proxy, place, postgres)) as store:
        await store.lock()
        proxy.next_loss = loss
        new = session("s")
        assert await store.add_session(new, max_sessions=1, max_kept_sessions=1) is None
        assert (await store.kept("o"))["sessions"].count == 1
        reached = await store.add_session(session("t"), max_sessions=1, max_kept_sessions=1)
        assert reached is not None
