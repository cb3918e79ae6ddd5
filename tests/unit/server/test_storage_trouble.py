"""A full or read-only storage: said as such, nothing lost, nothing twice; and orderly ends."""

from __future__ import annotations

import msgspec
import pytest

from tinkex.errors import StorageError
from tinkex.testing.fake_engine import Delays

from .mortal import World, publish, save_state, train
from .test_recovery import KEEP, undisturbed

pytestmark = pytest.mark.anyio

FULL = StorageError("the disk is full: free some space", "/data")


async def test_a_request_that_cannot_be_kept_is_not_accepted() -> None:
    world = World()
    async with world.server() as api:
        model = await api.model()
        world.store.broken = True
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        reply = await api.call("POST", "/optim_step", body)
        assert reply.status in (503, 507)
        assert b"full" in reply.body
        world.store.broken = False
        assert await world.store.pending() == []
        assert (await api.result(await api.step(model, 1)))["metrics"]["step"] == 1


async def test_an_outcome_that_cannot_be_stored_is_kept_until_it_can() -> None:
    world = World(long_poll_s=20)
    async with world.server(delays=Delays(train_s=5)) as api:
        model = await api.model()
        first, second = await api.train(model, 1), await api.step(model, 2)
        await api.clock.sleep(1)
        world.store.broken = True
        assert msgspec.json.decode((await api.poll(first)).body)["type"] == "try_again"
        world.store.broken = False
        assert await api.loss(first) > 0
        assert (await api.result(second))["metrics"]["step"] == 1
        calls = [call.name for call in world.engine.calls]
        assert (calls.count("train"), calls.count("optim_step")) == (1, 1)


async def test_a_checkpoint_that_does_not_fit_fails_and_fits_later() -> None:
    world = World()
    async with world.server() as api:
        model = await api.model()
        world.engine.fail_next("save_adapter", FULL)
        body = {"model_id": model, "seq_id": 1, "path": "a"}
        failed = await api.outcome(await api.post("/save_weights", body))
        assert failed["category"] == "server"
        assert "free some space" in failed["error"]
        assert (await save_state(api, model, 2, "a")).endswith("/a")


async def test_training_goes_on_without_a_snapshot_and_takes_it_later() -> None:
    world = World(snapshot_ops=2)
    async with world.server() as api:
        model = await api.model()
        world.engine.fail_next("save_adapter", FULL)
        answers = await train(api, model, 1, 2)
        assert world.disk == {}
        await api.clock.sleep(60)
        answers += await train(api, model, 7, 1)
        await api.clock.sleep(60)
        assert len(world.disk) == 1
    assert answers == (await undisturbed(3))[0]


async def test_published_weights_that_do_not_fit_are_kept_as_soon_as_they_do() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        model = await api.model()
        world.engine.fail_next("save_snapshot", FULL)
        sampler = await publish(api, model, 1, 0)
        await api.clock.sleep(0.1)
        assert world.disk == {}
        await api.clock.sleep(1)
        assert list(world.disk) == [f"sampler/{sampler}"]


async def test_an_orderly_end_lets_what_runs_end_and_writes_models_down() -> None:
    world = World(grace_s=60, **KEEP)
    async with world.server(delays=Delays(train_s=10)) as api:
        model = await api.model()
        running, waiting = await api.train(model, 1), await api.step(model, 2)
        sampler = await api.sampler(await api.session())
        await api.clock.sleep(5)
    assert list(world.disk) == [f"snapshot/{model}@0"]
    done = await world.store.get_operation(running["request_id"])
    assert done is not None
    assert (done.state, done.body) == ("done", b"")
    (pending,) = await world.store.pending()
    assert pending.op_id == waiting["request_id"]
    async with world.server() as api:
        assert (await api.result(waiting))["metrics"]["step"] == 1
        assert [call.name for call in world.engine.calls].count("train") == 0
        assert sampler


async def test_an_orderly_end_does_not_wait_for_ever() -> None:
    world = World(grace_s=60)
    async with world.server(delays=Delays(train_s=1000)) as api:
        model = await api.model()
        future = await api.train(model, 1)
        await api.clock.sleep(5)
    assert world.clock.now() == 65
    async with world.server() as api:
        assert await api.loss(future) > 0


async def test_old_operations_are_forgotten_and_turns_go_on_counting() -> None:
    world = World(snapshot_ops=2, result_ttl_s=1000)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 4)
        await api.clock.sleep(2000)
        store = world.store
        session = model.partition(":")[0]
        assert len(await store.operations(session)) <= 2
    async with world.server() as api:
        begun = api.clock.now()
        metrics = (await api.result(await api.step(model, 13)))["metrics"]
        assert metrics["step"] == 5
        assert api.clock.now() == begun
