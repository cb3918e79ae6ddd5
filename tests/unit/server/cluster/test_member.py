"""A node that hands a key over while requests for it are under way; the other is only a record."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tinkex.clock import SystemClock
from tinkex.server.app import create_app, running
from tinkex.server.cluster.member import Joined
from tinkex.server.server_settings import ServerSettings
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.ownership import NODE_VERSION, Node, NodeLoad, NodeModel
from tinkex.testing import FakeClock, FakeEngine
from tinkex.testing.asgi import AsgiTransport
from tinkex.transport.base import HttpRequest, Pool, Reply
from tinkex.types import SessionCancelled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tinkex.clock import Clock
    from tinkex.server.api.call import Parts
    from tinkex.server.store.ownership import Claim
    from tinkex.server.store.records import Operation

pytestmark = pytest.mark.anyio
LEASE_S = 3600.0
MODEL = "tinkex/tiny"


class SlowStore(MemoryStore):
    """Keeps an operation and then answers only when it may."""

    def hold(self) -> None:
        self.kept, self.may_answer = anyio.Event(), anyio.Event()

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        found = await super().submit(operation)
        if hasattr(self, "kept") and operation.kind == "optim_step":
            self.kept.set()
            await self.may_answer.wait()
        return found


def node(name: str) -> Node:
    return Node(node_id=f"{name}#1", name=name, url="http://127.0.0.1:9", version=NODE_VERSION)


async def add_node(store: MemoryStore, name: str) -> MemoryStore:
    """Another node, of which only its record is there."""
    served = NodeModel(name=MODEL, max_context_length=64, vocab_size=256)
    other = store.beside()
    await other.join("test", node(name), LEASE_S)
    await other.announce([served])
    return other


@asynccontextmanager
async def running_node(
    store: MemoryStore,
    clock: Clock | None = None,
    lease_s: float = LEASE_S,
    grace_s: float = 0.0,
    rebalance_s: float = 0.0,
) -> AsyncGenerator[tuple[Parts, AsgiTransport]]:
    clock = clock or SystemClock()
    membership = await store.join("test", node("a"), lease_s)
    lost: list[str] = []
    joined = Joined(
        membership=membership, lease_s=lease_s, on_lost=lost.append, rebalance_s=rebalance_s
    )
    settings = ServerSettings(grace_s=grace_s)
    app = create_app(store, FakeEngine(clock), settings, clock, joined=joined)
    async with running(app.state.parts):
        yield app.state.parts, AsgiTransport(app)
    assert lost == []


async def post(transport: AsgiTransport, path: str, body: Any) -> Reply:
    headers = {"x-api-key": "tml-one", "accept": "application/json"}
    data = msgspec.json.encode(body)
    return await transport.send(
        HttpRequest("POST", f"/api/v1{path}", Pool.REST, 3600, "", headers, data)
    )


async def created(transport: AsgiTransport) -> str:
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    reply = await post(transport, "/create_session", session)
    body = {
        "session_id": msgspec.json.decode(reply.body)["session_id"],
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
    }
    future = msgspec.json.decode((await post(transport, "/create_model", body)).body)
    result = await post(transport, "/retrieve_future", future)
    return msgspec.json.decode(result.body)["model_id"]


class WaitingStore(MemoryStore):
    """Reading what there is of a key takes a while, as it does in a database."""

    async def adopt(self, claim: Claim) -> None:
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        await super().adopt(claim)


async def test_requests_that_arrive_together_take_a_new_key_over_once() -> None:
    store = WaitingStore()
    async with running_node(store) as (_, transport):
        session_id = (await created(transport)).partition(":")[0]
        body = {
            "session_id": session_id,
            "model_seq_id": 1,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        }
        replies: list[Reply] = []

        async def create() -> None:
            replies.append(await post(transport, "/create_model", body))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(create)
        assert [reply.status for reply in replies] == [200] * 8


async def test_a_request_that_is_kept_during_a_handover_is_left_to_the_next_owner() -> None:
    store = SlowStore()
    async with running_node(store) as (parts, transport):
        model_id = await created(transport)
        await add_node(store, "b")
        store.hold()
        replies: list[Reply] = []

        async def step() -> None:
            body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
            replies.append(await post(transport, "/optim_step", body))

        async with anyio.create_task_group() as group:
            group.start_soon(step)
            await store.kept.wait()
            await store.want(model_id, "b#1")
            while (claim := await store.get_claim(model_id)) is None or claim.node_id != "b#1":
                await anyio.lowlevel.checkpoint()
            store.may_answer.set()
        # Clients send it again after this, and the next owner finds it.
        assert replies[0].status == 503
        assert [op.op_id for op in await store.operations(model_id.partition(":")[0])][-1:] == [
            f"{model_id}:1"
        ]
        assert parts.worker.held()["models"] == 0
        assert len(parts.worker.queue_lengths()) == 0


class DistantStore(MemoryStore):
    """A renewal waits for the database for a while, and succeeds."""

    away_s = 0.0

    async def renew(self, lease_s: float, load: NodeLoad) -> float:
        await self._clock.sleep(self.away_s)
        return await super().renew(lease_s, load)


async def test_no_node_is_declared_dead_just_after_the_database_was_out_of_reach() -> None:
    clock = FakeClock()
    store = DistantStore(clock)
    async with clock.running(), running_node(store, clock, lease_s=9.0):
        other = store.beside()
        await other.join("test", node("b"), 9.0)
        await clock.sleep(5.0)
        store.away_s = 20.0
        # Longer than the lease of both nodes; the other one is the last to reach it again.
        await clock.sleep(27.0)
        store.away_s = 0.0
        assert (await other.nodes())[1].state == "alive"
        await other.renew(9.0, NodeLoad())
        # From then on it is silent.
        await clock.sleep(30.0)
        assert (await store.nodes())[1].state == "dead"


async def test_the_last_node_saves_its_models_before_it_leaves() -> None:
    store = MemoryStore()
    async with running_node(store, grace_s=60.0) as (_, transport):
        model_id = await created(transport)
        body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        future = msgspec.json.decode((await post(transport, "/optim_step", body)).body)
        assert (await post(transport, "/retrieve_future", future)).status == 200
    model = await store.get_model(model_id)
    assert model is not None
    assert model.snapshot_seq == 1
    assert [each.state for each in await store.nodes()] == ["left"]


class DeafStore(MemoryStore):
    """Hints come when the test sends them, as those of PostgreSQL do: from no task."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._heard: list[Callable[[str], None]] = []

    def on_hint(self, hint: Callable[[str], None]) -> None:
        self._heard.append(hint)

    def hear(self, hint: str) -> None:
        for each in self._heard:
            each(hint)


@pytest.mark.parametrize("heard", [True, False])
async def test_a_session_that_another_node_has_ended_holds_nothing_here(heard: bool) -> None:
    clock = FakeClock()
    store = DeafStore(clock)
    async with clock.running(), running_node(store, clock, lease_s=9.0) as (parts, transport):
        session_id = (await created(transport)).partition(":")[0]
        session = await store.get_session(session_id)
        assert session is not None
        assert await store.beside().end_session(session, SessionCancelled(detail=""))
        if heard:
            loop, elsewhere = asyncio.get_running_loop(), contextvars.Context()
            loop.call_soon(store.hear, f"session {session_id}", context=elsewhere)
        await clock.sleep(5.0 if heard else 120.0)
        assert parts.worker.held()["models"] == 0
        assert await store.claims() == []


async def keep_alive(store: MemoryStore, clock: Clock) -> None:
    while True:
        await store.renew(9.0, NodeLoad())
        await clock.sleep(3.0)


@pytest.mark.parametrize(("rebalance_s", "moved"), [(0.0, 0), (30.0, 1)])
async def test_a_key_goes_to_a_node_that_joined_later(rebalance_s: float, moved: int) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    joined = running_node(store, clock, lease_s=9.0, grace_s=9e9, rebalance_s=rebalance_s)
    async with clock.running(), joined as (parts, transport), anyio.create_task_group() as group:
        for _ in range(3):
            await created(transport)
        other = await add_node(store, "b")
        group.start_soon(keep_alive, other, clock)
        await clock.sleep(200.0)
        # The difference is less than two after one move.
        owners = [claim.node_id for claim in await store.claims()]
        assert owners.count("b#1") == moved
        assert len(owners) == 3
        assert parts.worker.held()["models"] == 3 - moved
        group.cancel_scope.cancel()


async def test_a_node_reports_the_bytes_of_its_adapters() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with clock.running(), running_node(store, clock, lease_s=9.0) as (parts, transport):
        await created(transport)
        await clock.sleep(9.0)
        expected = (await parts.engine.stats())["adapters_resident_bytes"]
        (load,) = [each.load for each in await store.nodes()]
        assert load.resident_bytes == expected > 0


async def test_requests_for_a_base_model_whose_nodes_ended_are_held_for_a_while() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with clock.running(), running_node(store, clock, lease_s=9.0) as (_, transport):
        await created(transport)
        other = store.beside()
        await other.join("test", node("b"), 9.0)
        served = NodeModel(name="tinkex/other", max_context_length=64, vocab_size=256)
        await other.announce([served])
        await other.leave()
        await clock.sleep(9.0)
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        opened = msgspec.json.decode((await post(transport, "/create_session", session)).body)
        body = {
            "session_id": opened["session_id"],
            "model_seq_id": 0,
            "lora_config": {"rank": 4},
        }
        told: list[tuple[int, float]] = []
        for name in ("tinkex/other", "tinkex/unknown"):
            began = clock.now()
            reply = await post(transport, "/create_model", {**body, "base_model": name})
            told.append((reply.status, clock.now() - began))
        (held, held_s), (unknown, unknown_s) = told
        assert (held, unknown) == (503, 400)
        assert held_s >= 20.0
        assert unknown_s < 1.0


@pytest.mark.parametrize("alive", [True, False])
async def test_a_request_for_an_owner_that_cannot_be_reached_is_held_until_it_is_known(
    alive: bool,
) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    joined = running_node(store, clock, lease_s=9.0, grace_s=9e9)
    async with clock.running(), joined as (parts, transport), anyio.create_task_group() as group:
        model_id = await created(transport)
        other = await add_node(store, "b")
        group.start_soon(keep_alive, other, clock)
        await store.want(model_id, "b#1")
        while (claim := await store.get_claim(model_id)) is None or claim.node_id != "b#1":
            await clock.sleep(1.0)
        member = parts.member
        assert member is not None
        last = member.roster.nodes["b#1"]
        if not alive:
            group.cancel_scope.cancel()
        began = clock.now()
        with anyio.CancelScope(shield=True):
            found = await member.next_owner(model_id, last, unreachable=True)
            held_s = clock.now() - began
            now = await store.get_claim(model_id)
        assert found is None
        assert now is not None
        # It is alive, and this node is told so; or it is dead, and this node has the key.
        assert now.node_id == ("b#1" if alive else "a#1")
        assert 3.0 <= held_s < 20.0
        group.cancel_scope.cancel()
