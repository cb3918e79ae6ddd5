"""Everything a call can wait for is told as a wait of that reason."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.own_thread import in_own_thread
from tests.unit.clients.world import MODEL, World, datum
from tinkex import ModelInput, SamplingParams
from tinkex.futures.admission import ByteBudget
from tinkex.metrics import RETRIES, WAIT, Measurement, subscribe
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.metrics import Metric

pytestmark = pytest.mark.req("S39")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def heard() -> Iterator[list[Measurement]]:
    measurements: list[Measurement] = []
    stop = subscribe(in_own_thread(measurements.append))
    yield measurements
    stop()


def told(heard: list[Measurement], metric: Metric) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = {}
    for one in heard:
        if one.metric is metric:
            labels = tuple(one.labels.values())
            sums[labels] = sums.get(labels, 0.0) + one.value
    return sums


def sample(world: World, count: int = 1) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            await asyncio.gather(*(sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(count)))

    world.run(scenario)


def test_a_place_among_the_samples_under_way(heard: list[Measurement]) -> None:
    world = World({"sample_max_concurrent_requests": 1, "sample_use_retrieve_futures": False})
    world.server.engine.delays = Delays(sample_s=2.0)
    sample(world, 3)
    assert told(heard, WAIT) == {("slot",): pytest.approx(2.0 + 4.0)}


@pytest.mark.parametrize(("status", "reason"), [(429, "rate_limit"), (402, "billing")])
def test_a_pause_of_all_samplers(heard: list[Measurement], status: int, reason: str) -> None:
    world = World()
    world.server.faults.on("asample", faults.reply(status))
    sample(world)
    assert told(heard, RETRIES) == {("asample", reason): 1}
    assert told(heard, WAIT)[reason,] > 0


def test_a_sample_that_failed_and_is_sent_again(heard: list[Measurement]) -> None:
    world = World()
    world.server.faults.on("asample", faults.reply(503))
    sample(world)
    assert told(heard, RETRIES) == {("asample", "backoff"): 1}
    assert told(heard, WAIT)["backoff",] > 0


def train(world: World) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            await training.forward_backward([datum()], "cross_entropy")

    world.run(scenario)


@pytest.mark.parametrize(
    ("state", "reason"), [("paused_capacity", "capacity"), ("paused_rate_limit", "rate_limit")]
)
def test_a_queue_that_the_server_has_paused(
    heard: list[Measurement], state: str, reason: str
) -> None:
    async def held(exchange: Any) -> None:
        await exchange.clock.sleep(10.0)
        await faults.try_again(state)(exchange)

    world = World()
    world.server.faults.on("retrieve_future", held)
    train(world)
    assert told(heard, WAIT) == {(reason,): pytest.approx(10.0)}


def test_a_poll_that_failed(heard: list[Measurement]) -> None:
    world = World()
    world.server.faults.on("retrieve_future", faults.reply(503))
    train(world)
    assert told(heard, RETRIES) == {("retrieve_future", "backoff"): 1}
    assert told(heard, WAIT)["backoff",] > 0


def test_a_result_that_the_server_has_lost(heard: list[Measurement]) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            world.server.faults.on("retrieve_future", faults.reply(410))
            await training.forward_backward([datum()], "cross_entropy")

    World().run(scenario)
    assert told(heard, RETRIES) == {("forward_backward", "backoff"): 1}


def test_room_in_a_byte_budget(heard: list[Measurement]) -> None:
    async def main() -> None:
        budget = ByteBudget(0)
        await budget.take(1)
        second = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0.002)
        budget.give_back(1)
        await second

    asyncio.run(main())
    (one,) = heard
    assert one.labels == {"reason": "bytes"}
    assert one.value >= 0.001
