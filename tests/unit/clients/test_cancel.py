"""Cancelling: what it stops, what it leaves running, and that nobody else notices."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest

from tests.held import held
from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, APIFuture, ModelInput, SamplingParams, ServiceClient
from tinkex.testing import API_KEY, Delays, FakeServer, faults

pytestmark = pytest.mark.req("S24")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2, seed=1)


@pytest.mark.req("S25")
def test_a_training_call_that_was_sent_still_runs_and_the_next_ones_follow_it():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=30.0)
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            abandoned = training.forward_backward([datum()], "cross_entropy")
            behind = training.optim_step(AdamParams())
            await world.clock.sleep(5.0)
            assert abandoned.status().state == "running"
            assert abandoned.cancel()
            await behind
            assert world.clock.now() == pytest.approx(30.0, abs=1.0)

    world = World()
    world.run(scenario)
    ran = [call.name for call in world.server.engine.calls]
    assert (ran.count("train"), ran.count("optim_step")) == (1, 1)


@pytest.mark.req("S25")
def test_a_training_call_that_has_not_started_is_withdrawn_and_its_turn_given_on():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=30.0)
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            first = training.forward_backward([datum()], "cross_entropy")
            withdrawn = training.forward([datum()], "cross_entropy")
            behind = training.optim_step(AdamParams())
            await world.clock.sleep(5.0)
            assert withdrawn.cancel()
            await first
            await behind
            assert world.clock.now() == pytest.approx(30.0, abs=1.0)
            assert len(world.server.seen("cancel_future")) == 1

    world = World()
    world.run(scenario)
    ran = [call.name for call in world.server.engine.calls]
    assert (ran.count("train"), ran.count("optim_step")) == (1, 1)


def test_the_documentation_says_what_cannot_be_cancelled():
    assert "cannot be cancelled" in (APIFuture.__doc__ or "")


def test_a_blocking_timeout_leaves_the_call_running_and_an_async_one_cancels_it():
    go_on = threading.Event()
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL)
        server.faults.on("asample", held(go_on), times=None)
        patient = sampler.sample(PROMPT, 1, PARAMS)
        with pytest.raises(TimeoutError):
            patient.result(0.01)
        assert not patient.cancelled()
        go_on.set()
        assert len(patient.result(PATIENCE_S).sequences) == 1

        go_on.clear()
        hasty = sampler.sample(PROMPT, 1, PARAMS)

        async def wait() -> None:
            await hasty.result_async(timeout=0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(wait())
        assert hasty.cancelled()
        go_on.set()


def test_cancelling_a_finished_call_changes_nothing():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            future = sampler.sample(PROMPT, 1, PARAMS)
            answer = await future
            assert not future.cancel()
            assert await future is answer
            await world.clock.sleep(5.0)

    world = World()
    world.run(scenario)
    assert world.server.seen("cancel_future") == []


@pytest.mark.req("S22")
@pytest.mark.parametrize("queued", [True, False])
def test_a_cancelled_chunked_call_ends_all_its_parts(queued: bool):
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=100.0)
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            if queued:
                world.server.faults.on("optim_step", faults.slow(50.0), times=None)
                training.optim_step(AdamParams())
            future = training.forward_backward(
                [datum(first=1 + i) for i in range(3)], "cross_entropy"
            )

            async def consume() -> list[Any]:
                return [part async for part in future]

            consuming = asyncio.ensure_future(consume())
            await world.clock.sleep(5.0)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
                await asyncio.wait_for(consuming, PATIENCE_S)

    World({"fwdbwd_max_chunk_len": 1}).run(scenario)


def test_one_of_many_waiters_going_away_does_not_cancel_the_others():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(sample_s=20.0)
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
            await world.clock.sleep(5.0)
            for future in futures[::2]:
                future.cancel()
            answers = await asyncio.gather(*futures[1::2])
            assert len(answers) == 5

    for feed in (True, False):
        world = World({"sample_use_retrieve_futures": feed})
        world.run(scenario)
        assert len(world.server.seen("cancel_future")) == 5


def test_cancelling_from_another_thread_reaches_the_server():
    with (
        FakeServer(delays=Delays(sample_s=3600.0)).serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL)
        future = sampler.sample(PROMPT, 1, PARAMS)
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        while future.status().state != "running":
            assert not future.done()
        threading.Thread(target=future.cancel).start()
        assert ended.wait(PATIENCE_S)
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(PATIENCE_S)
        deadline = server.clock.now() + PATIENCE_S
        while not server.seen("cancel_future"):
            assert server.clock.now() < deadline
