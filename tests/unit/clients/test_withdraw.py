"""Training operations that the server has accepted, but not started, can be taken back."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams
from tinkex.testing import Delays, faults


@pytest.mark.req("S24")
def test_a_training_operation_that_waits_on_the_server_is_withdrawn_there():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            before = await training.forward([datum()], "cross_entropy")
            world.server.engine.delays = Delays(train_s=30.0)
            busy = training.forward_backward([datum()], "cross_entropy")
            step = training.optim_step(AdamParams(learning_rate=0.5))
            await world.clock.sleep(5.0)
            assert (busy.status().state, step.status().state) == ("running", "running")
            assert step.cancel()
            await busy
            after = await training.forward([datum()], "cross_entropy")
            assert after.metrics == before.metrics
            assert len(world.routes("cancel_future")) == 1

    World().run(scenario)


def test_what_has_run_keeps_its_effect_when_its_future_is_cancelled():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            before = await training.forward([datum()], "cross_entropy")
            await training.forward_backward([datum()], "cross_entropy")
            world.server.faults.on("retrieve_future", faults.hang(), times=None)
            step = training.optim_step(AdamParams(learning_rate=0.5))
            await world.clock.sleep(5.0)
            assert step.cancel()
            await asyncio.sleep(0)
            world.server.faults.clear()
            after = await training.forward([datum()], "cross_entropy")
            assert after.metrics["loss:sum"] < before.metrics["loss:sum"]

    World().run(scenario)
