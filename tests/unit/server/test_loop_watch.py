"""The watch over the event loop: steps of requests are measured, blocks are counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from tests.own_thread import own_records
from tinkex.server.observability.loop_watch import (
    BACKGROUND,
    BLOCK_S,
    CoreWaits,
    CpuReading,
    LoopTime,
    LoopWatch,
    Watched,
)
from tinkex.server.observability.meters import Meters

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def compute(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def value(meters: Meters, name: str, route: str) -> float | None:
    return meters.registry.get_sample_value(f"tinkex_{name}", {"route": route})


async def test_the_longest_step_is_measured_and_waiting_is_not() -> None:
    async def work() -> None:
        compute(0.02)
        await asyncio.sleep(0.05)
        compute(0.06)
        await asyncio.sleep(0)

    spent = LoopTime()
    await Watched(work(), spent, CpuReading())
    assert 0.055 < spent.longest_cpu_s < 0.2
    assert spent.longest_s >= spent.longest_cpu_s
    assert spent.cpu_s > 0.075


async def test_errors_and_cancelling_pass_through() -> None:
    seen: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await Watched(fails(), LoopTime(), CpuReading())

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # tidying up may wait, too
            seen.append("cancelled")
            raise
        finally:
            seen.append("closed")

    async def run() -> None:
        await Watched(waits(), LoopTime(), CpuReading())

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "closed"]


async def test_a_coroutine_that_is_dropped_is_closed() -> None:
    closed: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    steps: Any = Watched(waits(), LoopTime(), CpuReading()).__await__()
    next(steps)
    steps.close()
    assert closed == [True]


def test_blocks_are_counted_by_route_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meters = Meters()
    watch = LoopWatch(meters)
    for longest_s in (BLOCK_S / 2, 2 * BLOCK_S, 3 * BLOCK_S):
        spent = LoopTime()
        spent.longest_s, spent.longest_cpu_s = longest_s, longest_s / 2
        watch.add("asample", spent)
    assert value(meters, "loop_blocks_total", "asample") == 2
    assert value(meters, "loop_longest_cpu_seconds", "asample") == pytest.approx(1.5 * BLOCK_S)
    lines = [r.getMessage() for r in own_records(caplog) if r.levelno == logging.WARNING]
    assert lines == ["asample held the event loop for 200 ms (100 ms of CPU)"]


async def test_what_blocks_between_requests_is_the_backgrounds() -> None:
    meters = Meters()
    watch = LoopWatch(meters)
    with watch.running():
        compute(0.3)
        # The timer is late by now, and comes in one of the next rounds of the loop.
        for _ in range(5):
            await asyncio.sleep(0)
    assert value(meters, "loop_blocks_total", BACKGROUND) == 1
    assert (value(meters, "loop_longest_cpu_seconds", BACKGROUND) or 0) > 0.1


async def late_tick(held_s: float) -> float:
    """The blocks of the background after the loop was held for so long."""
    meters = Meters()
    with LoopWatch(meters).running():
        time.sleep(held_s)  # noqa: ASYNC251 - holds the loop without CPU
        for _ in range(5):
            await asyncio.sleep(0)
    return value(meters, "loop_blocks_total", BACKGROUND) or 0.0


async def test_the_background_is_not_blamed_for_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that waits for a core is late without holding the loop."""
    began = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(CoreWaits, "seconds", lambda _: time.perf_counter() - began)
        assert await late_tick(0.3) == 0
    assert await late_tick(0.3) > 0


async def test_without_the_numbers_of_the_system_every_lateness_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tinkex.server.observability.loop_watch._SCHEDULED", "/nonexistent")
    assert await late_tick(0.3) > 0


def test_the_time_without_a_core_never_shrinks() -> None:
    waits = CoreWaits()
    first = waits.seconds()
    compute(0.02)
    assert waits.seconds() >= first >= 0
    waits.close()
    assert waits.seconds() == 0
