"""The byte budget: order, oversize, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S
from tinkex.futures.admission import ByteBudget


def test_one_oversized_item_passes_and_the_next_waits_for_it():
    async def scenario() -> list[str]:
        budget, log = ByteBudget(10), []

        async def use(name: str, size: int) -> None:
            async with budget.reserve(size):
                log.append(f"{name} in")
                await asyncio.sleep(0)
                log.append(f"{name} out")

        await asyncio.gather(use("big", 50), use("small", 1))
        assert budget.left == 10
        return log

    assert asyncio.run(scenario()) == ["big in", "big out", "small in", "small out"]


def test_items_that_fit_go_together():
    async def scenario() -> int:
        budget = ByteBudget(10)
        async with budget.reserve(5), budget.reserve(5), budget.reserve(0):
            return budget.left

    assert asyncio.run(scenario()) == 0


@pytest.mark.req("S25")
def test_a_cancelled_waiter_gives_its_place_to_the_next():
    async def scenario() -> str:
        budget = ByteBudget(1)
        await budget.take(5)
        first = asyncio.ensure_future(budget.take(1))
        second = asyncio.ensure_future(budget.take(1))
        await asyncio.sleep(0)
        first.cancel()
        budget.give_back(5)
        await second
        return "second"

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == "second"


def test_a_waiter_cancelled_in_the_moment_it_is_admitted_passes_it_on():
    async def scenario() -> str:
        budget = ByteBudget(1)
        await budget.take(5)
        first = asyncio.ensure_future(budget.take(1))
        second = asyncio.ensure_future(budget.take(1))
        await asyncio.sleep(0)
        budget.give_back(5)
        first.cancel()
        await second
        return "second"

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == "second"
