"""Room for the large bodies of a tenant."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from tinkex.server.api.limits import BodyRoom

pytestmark = pytest.mark.anyio


async def held(room: BodyRoom, owner: str, size: int, began: list[str], end: anyio.Event) -> None:
    async with room.of(owner, size):
        began.append(f"{owner} {size}")
        await end.wait()


async def test_bodies_of_one_tenant_wait_in_order_and_others_do_not() -> None:
    room, began = BodyRoom(100), list[str]()
    ends = [anyio.Event() for _ in range(4)]
    async with anyio.create_task_group() as group:
        for size, end in zip((60, 50, 10), ends, strict=False):
            group.start_soon(held, room, "one", size, began, end)
            await anyio.lowlevel.checkpoint()
        group.start_soon(held, room, "two", 100, began, ends[3])
        await anyio.wait_all_tasks_blocked()
        # The third would fit, but not before the second.
        assert began == ["one 60", "two 100"]
        ends[0].set()
        await anyio.wait_all_tasks_blocked()
        assert began[2:] == ["one 50", "one 10"]
        for end in ends:
            end.set()
    async with room.of("one", 100):
        pass


async def test_a_body_larger_than_the_room_goes_alone() -> None:
    room, began, end = BodyRoom(100), list[str](), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(held, room, "one", 1000, began, end)
        group.start_soon(held, room, "one", 1, began, end)
        await anyio.wait_all_tasks_blocked()
        assert began == ["one 1000"]
        end.set()
    assert began == ["one 1000", "one 1"]


@pytest.mark.parametrize("served", [False, True])
async def test_one_that_gives_up_leaves_its_room_to_the_next(served: bool) -> None:
    room, began, first, end = BodyRoom(100), list[str](), anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(held, room, "one", 100, began, first)
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(held, room, "one", 90, began, end)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(held, room, "one", 20, began, end)
            await anyio.wait_all_tasks_blocked()
            if served:
                first.set()
                await anyio.lowlevel.checkpoint()  # its turn comes while it is cancelled
            waiting.cancel_scope.cancel()
        first.set()
        await anyio.wait_all_tasks_blocked()
        assert "one 20" in began
        end.set()
    async with room.of("one", 100):
        pass
