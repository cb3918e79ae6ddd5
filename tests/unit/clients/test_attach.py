"""Losing the training program does not lose the run: another program attaches to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.clients.test_lifecycle import numbers
from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams
from tinkex.errors import (
    APIStatusError,
    BadRequestError,
    ConflictError,
    InputError,
    NotFoundError,
    PromiseLostError,
)
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from tinkex import ServiceClient, TrainingClient

pytestmark = pytest.mark.req("S41")

ADAM = AdamParams(learning_rate=0.1)
STEPS = 4


async def start(world: World) -> tuple[ServiceClient, TrainingClient]:
    service = world.service()
    return service, await service.create_lora_training_client_async(MODEL, rank=2, seed=1)


async def kill(world: World, service: ServiceClient) -> None:
    """The program is gone: no farewell, no heartbeat any more. Returns when that shows."""
    service.holder.abandon()
    await world.clock.sleep(41.0)


async def losses(client: TrainingClient, steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        passed = client.forward_backward([datum()], "cross_entropy")
        await client.optim_step(ADAM)
        found.append((await passed).metrics["loss:sum"])
    return found


def test_another_program_goes_on_at_the_next_number_after_what_was_pending():
    async def unbroken(world: World) -> list[float]:
        _, client = await start(world)
        return await losses(client, STEPS)

    async def killed(world: World) -> list[float]:
        service, client = await start(world)
        found = await losses(client, 1)
        assert client.next_seq_id == 3
        # Two requests of a step are accepted and nothing of it has run when the program dies.
        world.server.engine.delays = Delays(train_s=100.0)
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(ADAM)
        await world.clock.sleep(1.0)
        await kill(world, service)
        world.server.engine.delays = Delays()
        async with world.service() as other:
            attached = await other.attach_training_client_async(client.model_id)
            assert attached.model_id == client.model_id
            assert attached.next_seq_id == 5
            return found + await losses(attached, STEPS - 2)

    wanted = World().run(unbroken)
    world = World()
    found = world.run(killed)
    assert found == [wanted[0], *wanted[2:]]
    assert numbers(world, "forward_backward", "optim_step") == list(range(1, 2 * STEPS + 1))


def test_a_run_whose_program_lives_is_refused_at_once():
    async def scenario(world: World) -> None:
        service, client = await start(world)
        async with world.service() as other:
            with pytest.raises(ConflictError, match="Another program is training model"):
                await other.attach_training_client_async(client.model_id)
        await losses(client, 1)
        await service.close_async()

    world = World()
    world.run(scenario)
    assert len(world.server.seen("attach_model")) == 1


def test_a_program_that_was_only_suspended_can_no_longer_train_the_run():
    async def scenario(world: World) -> None:
        service, client = await start(world)
        world.server.faults.on("session_heartbeat", faults.drop(), times=None)
        await world.clock.sleep(41.0)
        world.server.faults.clear()
        async with world.service() as other:
            attached = await other.attach_training_client_async(client.model_id)
            with pytest.raises(BadRequestError, match="Another program has attached to model"):
                await client.optim_step(ADAM)
            await losses(attached, 1)
        await service.close_async()

    World().run(scenario)


def test_one_client_attaches_to_a_run_once():
    async def scenario(world: World) -> None:
        service, client = await start(world)
        with pytest.raises(InputError, match="this client trains the run already"):
            await service.attach_training_client_async(client.model_id)
        await kill(world, service)
        async with world.service() as other:
            await other.attach_training_client_async(client.model_id)
            with pytest.raises(InputError, match="this client trains the run already"):
                await other.attach_training_client_async(client.model_id)

    World().run(scenario)


def test_an_attach_whose_reply_was_lost_is_asked_for_again():
    async def scenario(world: World) -> None:
        service, client = await start(world)
        await kill(world, service)
        world.server.faults.on("attach_model", faults.drop(handled=True))
        async with world.service() as other:
            await losses(await other.attach_training_client_async(client.model_id), 1)

    world = World()
    world.run(scenario)
    assert len(world.server.seen("attach_model")) == 2


def test_a_closed_run_is_refused_and_its_last_checkpoint_is_named():
    async def scenario(world: World) -> None:
        service, client = await start(world)
        path = (await client.save_state("step-1")).path
        await service.close_async()
        async with world.service() as other:
            with pytest.raises(PromiseLostError, match=f"{path}; load it with create_training_"):
                await other.attach_training_client_async(client.model_id)

    World().run(scenario)


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("saved", [True, False])
def test_a_server_that_cannot_attach_is_named_together_with_the_last_checkpoint(
    status: int, saved: bool
):
    async def scenario(world: World) -> None:
        service, client = await start(world)
        advice = "it has no checkpoint to continue from"
        if saved:
            path = (await client.save_state("step-1")).path
            advice = f"its last checkpoint is {path}: load it with create_training_client_from"
        await kill(world, service)
        world.server.faults.on("attach_model", faults.reply(status, {"detail": "Not Found"}))
        async with world.service() as other:
            with pytest.raises(APIStatusError, match="this server cannot attach") as caught:
                await other.attach_training_client_async(client.model_id)
        assert (caught.value.status_code, advice in str(caught.value)) == (status, True)

    World().run(scenario)


def test_a_run_that_the_server_does_not_know_is_not_found():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            with pytest.raises(NotFoundError, match="There is no model 'nothing'"):
                await service.attach_training_client_async("nothing")

    World().run(scenario)
