"""A node looks for the marks of others where it keeps weights; slow libraries hold nothing up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.patience import PATIENCE_S
from tinkex.clock import SystemClock
from tinkex.errors import StorageError
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.ownership import NODE_VERSION, Node, NodeModel
from tinkex.serving.shared_weights import check_shared

if TYPE_CHECKING:
    from tinkex.server.store.ownership import Membership

pytestmark = pytest.mark.anyio
LEASE_S = 15.0
TINY = NodeModel(name="tinkex/tiny", max_context_length=8, vocab_size=8)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _node(name: str) -> Node:
    return Node(
        node_id=f"{name}#1",
        name=name,
        url="http://127.0.0.1:1",
        version=NODE_VERSION,
        release="1",
        role="full",
    )


async def _joined(store: MemoryStore, name: str) -> Membership:
    return await store.join("lab", _node(name), LEASE_S)


async def test_the_loop_runs_while_a_place_is_opened() -> None:
    running = threading.Event()
    waited: list[bool] = []

    class Slow(MemoryFileSystem):
        """Its libraries take long to import."""

        protocol = "slow"

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            waited.append(running.wait(PATIENCE_S))

    fsspec.register_implementation("slow", Slow, clobber=True)
    store = MemoryStore()
    membership = await _joined(store, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(check_shared, store, membership, "slow://place", LEASE_S, SystemClock())
        await anyio.lowlevel.checkpoint()
        running.set()
    assert all(waited)
    assert waited


async def test_a_node_that_is_starting_too_is_waited_for() -> None:
    store = MemoryStore()
    first = await _joined(store, "a")
    second = await _joined(store.beside(), "b")
    place = "memory://starting"
    async with anyio.create_task_group() as group:
        group.start_soon(check_shared, store, second, place, LEASE_S, SystemClock())
        await anyio.wait_all_tasks_blocked()
        await check_shared(store, first, place, LEASE_S, SystemClock())


async def test_a_node_that_serves_has_left_its_mark_or_keeps_its_weights_elsewhere() -> None:
    store = MemoryStore()
    await _joined(store, "a")
    await store.announce([TINY])
    second = await _joined(store.beside(), "b")
    with pytest.raises(StorageError, match="Node a of this cluster keeps its weights elsewhere"):
        await check_shared(store, second, "memory://elsewhere", LEASE_S, _Stopped())


class _Stopped(SystemClock):
    """Nothing is waited for."""

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("it was waited for")
