"""FakeClock: virtual time that moves when everybody waits."""

from __future__ import annotations

import anyio
import pytest

from tinkex.clock import Clock, time_limit
from tinkex.testing.fake_clock import FakeClock

pytestmark = pytest.mark.anyio


async def test_an_hour_of_sleep_takes_no_real_time_and_moves_both_scales() -> None:
    clock: Clock = FakeClock(start=5.0, wall=1000.0)
    async with clock.running():  # type: ignore[attr-defined]
        await clock.sleep(3600)
    assert clock.now() == 3605.0
    assert clock.wall() == 4600.0


async def test_sleepers_wake_in_order_of_time_then_of_arrival() -> None:
    clock, woken = FakeClock(), list[str]()

    async def nap(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(f"{name}@{clock.now():g}")

    async with clock.running(), anyio.create_task_group() as group:
        for name, seconds in [("late", 3), ("first", 1), ("second", 1), ("mid", 2)]:
            group.start_soon(nap, name, seconds)
    assert woken == ["first@1", "second@1", "mid@2", "late@3"]


async def test_time_stands_still_while_a_task_still_runs() -> None:
    clock, seen = FakeClock(), list[float]()

    async def busy() -> None:
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        seen.append(clock.now())

    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(busy)
        await clock.sleep(10)
    assert seen == [0.0]


async def test_a_cancelled_sleeper_does_not_move_time() -> None:
    clock = FakeClock()
    async with clock.running():
        async with time_limit(clock, 2) as limit:
            await clock.sleep(1000)
        assert limit.expired
        assert clock.now() == 2
        await clock.sleep(1)
    assert clock.now() == 3
    assert clock.sleepers == 0


async def test_advance_wakes_everybody_due_on_the_way_and_nobody_else() -> None:
    clock, woken = FakeClock(), list[float]()

    async def tick() -> None:
        while True:
            await clock.sleep(2)
            woken.append(clock.now())

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await clock.advance(5)
        group.cancel_scope.cancel()
    assert woken == [2, 4]
    assert clock.now() == 5


async def test_zero_seconds_yields_without_a_jump() -> None:
    clock = FakeClock()
    await clock.sleep(0)
    await clock.sleep(-1)
    assert clock.now() == 0


async def test_two_jumpers_share_the_work_and_either_may_leave_first() -> None:
    clock = FakeClock()
    async with anyio.create_task_group() as group:
        left = anyio.Event()

        async def first() -> None:
            async with clock.running():
                await clock.sleep(5)
            left.set()

        group.start_soon(first)
        async with clock.running():
            await left.wait()
            await clock.sleep(10)
    assert clock.now() == 15


async def test_time_does_not_jump_over_a_callback_that_is_about_to_wake_a_task() -> None:
    # Leaving a task group waits for a callback of the loop while no task is running.
    clock = FakeClock()

    async def distant() -> None:
        await clock.sleep(1000)

    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(distant)
        for _ in range(20):
            async with time_limit(clock, 500):
                await anyio.lowlevel.checkpoint()
        assert clock.now() == 0
        group.cancel_scope.cancel()
