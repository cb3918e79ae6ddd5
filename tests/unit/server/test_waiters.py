"""Waiters: woken by a ring, ended by the clock."""

from __future__ import annotations

import anyio
import pytest

from tinkex.server.scheduler.outcomes import Waiters
from tinkex.testing import FakeClock

pytestmark = pytest.mark.anyio


async def test_a_ring_wakes_everybody_who_waits_for_the_key_and_nobody_else() -> None:
    clock, ready, found = FakeClock(), set[str](), list[tuple[str, str | None]]()
    waiters = Waiters(clock)

    async def wait(name: str, key: str) -> None:
        async def look() -> str | None:
            return key if key in ready else None

        found.append((name, await waiters.until(key, look, 30)))

    async with clock.running(), anyio.create_task_group() as group:
        for name, key in [("a", "x"), ("b", "x"), ("c", "y")]:
            group.start_soon(wait, name, key)
        await clock.sleep(1)
        ready.add("x")
        waiters.ring("x")
    assert found == [("a", "x"), ("b", "x"), ("c", None)]
    assert clock.now() == 30


async def test_a_ring_during_the_look_is_not_missed() -> None:
    clock, looks = FakeClock(), 0
    waiters = Waiters(clock)

    async def look() -> int | None:
        nonlocal looks
        looks += 1
        if looks == 2:
            waiters.ring("k")
        return looks if looks == 3 else None

    async with clock.running():
        assert await waiters.until("k", look, 30) == 3
    assert clock.now() == 0


async def test_nothing_is_left_behind_by_waiters_that_gave_up_or_were_cancelled() -> None:
    clock = FakeClock()
    waiters = Waiters(clock)

    async def look() -> None:
        return None

    async with clock.running():
        assert await waiters.until("k", look, 5) is None
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(waiters.until, "k", look, 500)
                await clock.sleep(1)
                scope.cancel()
    assert not waiters._bells
    assert not waiters._listeners


async def test_a_timeout_of_zero_looks_once() -> None:
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1

    assert await Waiters(FakeClock()).until("k", look, 0) is None
    assert looks == 1


async def test_whoever_waits_when_a_server_ends_is_let_go_and_nobody_waits_any_more() -> None:
    clock = FakeClock()
    waiters = Waiters(clock)
    found: list[None] = []

    async def look() -> None:
        return None

    async def wait() -> None:
        found.append(await waiters.until("k", look, 500))

    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(wait)
        await clock.sleep(1)
        waiters.close()
        await wait()
    assert found == [None, None]
    assert clock.now() == 1
