"""What client programs take for granted, each in a test of its own."""

from __future__ import annotations

import anyio
import pytest

from tinkex.testing.fake_engine import Delays

from .conftest import Api, Start, datum
from .mortal import World, logprobs, publish, save_state, train

pytestmark = pytest.mark.anyio

SUCCESS = {"reason": {"type": "success"}, "detail": None}


async def test_operations_run_in_seq_id_order_whatever_the_order_of_arrival(api: Api) -> None:
    model = await api.model()
    late = [await api.step(model, 4), await api.train(model, 3), await api.step(model, 2)]
    first = await api.loss(await api.train(model, 1))
    steps = [(await api.result(late[n]))["metrics"]["step"] for n in (2, 0)]
    assert steps == [1, 2]
    assert await api.loss(late[1]) < first


async def test_the_next_step_may_be_submitted_before_the_state_is_saved(api: Api) -> None:
    model = await api.model()
    saves = []
    for step in range(3):
        # Turns 3 and 4 of the next step are here before turn 3 of this one.
        await api.train(model, 3 * step + 1)
        await api.step(model, 3 * step + 2)
        if step:
            saves.append(await api.post("/save_weights", {"model_id": model, "seq_id": 3 * step}))
    saves.append(await api.post("/save_weights", {"model_id": model, "seq_id": 9}))
    paths = [(await api.result(save))["path"] for save in saves]
    steps = [api.server.engine._saved[f"{p}@{3 * n + 3}"][0].step for n, p in enumerate(paths)]
    assert steps == [1, 2, 3]


async def test_thousands_of_one_sample_calls_with_equal_prompts_all_come_back(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    futures = []

    async def submit(seq: int) -> None:
        futures.append(await api.sample(sampler, seq, sampling_params={"max_tokens": 2, "seed": 1}))

    async with anyio.create_task_group() as group:
        for seq in range(2000):
            group.start_soon(submit, seq)
    answers = {tuple((await api.sampled(f)).sequences[0].tokens) for f in futures}
    assert len(futures) == 2000
    assert len(answers) == 1


async def test_metadata_comes_back_by_the_path_of_a_checkpoint(api: Api) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "a", "user_metadata": {"note": "é", "n": "3"}}
    path = (await api.result(await api.post("/save_weights", body)))["path"]
    (found,) = (await api.get(f"/training_runs/{model}/checkpoints"))["checkpoints"]
    assert (found["tinker_path"], found["user_metadata"]) == (path, {"note": "é", "n": "3"})


async def test_a_checkpoint_loads_from_another_session_after_a_restart_with_its_shape() -> None:
    world = World()
    lora = {"rank": 5, "train_mlp": False, "train_unembed": False}
    async with world.server() as api:
        model = await api.model(lora_config=lora)
        await train(api, model, 1, 2)
        path = await save_state(api, model, 7)
    async with world.server() as api:
        info = await api.post("/weights_info", {"tinker_path": path})
        assert (info["lora_rank"], info["train_mlp"], info["train_attn"]) == (5, False, True)
        body = {
            "session_id": await api.session(),
            "model_seq_id": 0,
            "path": path,
            "optimizer": True,
        }
        other = (await api.result(await api.post("/load_weights", body)))["model_id"]
        assert (await api.post("/get_info", {"model_id": other}))["lora_rank"] == 5
        state = world.engine._adapters[other]
        assert (state.lora.rank, state.lora.train_mlp, state.lora.train_unembed) == (
            5,
            False,
            False,
        )
        assert (await api.result(await api.step(other, 1)))["metrics"]["step"] == 3


@pytest.mark.parametrize("ttl_s", [0, 1, 3599])
async def test_a_lifetime_below_an_hour_is_refused(api: Api, ttl_s: int) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": ttl_s}
    failed = await api.outcome(await api.post("/save_weights", body))
    assert failed["category"] == "user"
    assert "an hour" in failed["error"]


async def recipe(api: Api, number: int) -> str:
    """What a program does between opening a session and closing it."""
    session = await api.session()
    model = await api.model(session)
    await train(api, model, 1, 2)
    path = await save_state(api, model, 7, f"end-{number}")
    published = await publish(api, model, 8, 0)
    await logprobs(api, published, 0)
    named = await api.sampler(session, 1, model_path=path)
    await logprobs(api, named, 0)
    await api.post(f"/sessions/{session}/finish", SUCCESS)
    return path


async def test_recipe_after_recipe_leaves_nothing_but_its_checkpoints(start: Start) -> None:
    async with start(snapshot_ops=2, result_ttl_s=1000) as api:
        paths = [await recipe(api, number) for number in range(5)]
        await api.clock.sleep(1)
        worker, engine = api.server._parts.worker, api.server.engine
        assert worker.held() == dict.fromkeys(worker.held(), 0)
        assert (engine.adapters, engine.snapshots) == ((), ())
        assert sorted(engine._saved) == sorted(f"{path}@7" for path in paths)
        await api.clock.sleep(2000)
        store = api.server.store
        kept = [op for s in await store.sessions() for op in await store.operations(s.session_id)]
        # The last turn of each run is kept, so that nobody takes it twice.
        assert len(kept) <= 5
        assert all(op.body == b"" for op in kept)


async def test_a_model_of_a_session_that_is_over_cannot_be_trained_and_its_checkpoint_can(
    api: Api,
) -> None:
    path = await recipe(api, 0)
    model = path.removeprefix("tinker://").partition("/")[0]
    body = {"model_id": model, "seq_id": 9, "adam_params": {}}
    assert (await api.call("POST", "/optim_step", body)).status == 400
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    await api.result(await api.post("/load_weights", body))


async def test_a_session_that_ended_before_a_crash_is_cleaned_up_after_it() -> None:
    world = World()
    async with world.server(delays=Delays(train_s=10)) as api:
        session = await api.session()
        model = await api.model(session)
        future = await api.train(model, 1)
        await publish(api, model, 2, 0)
        await api.train(model, 3)
        await api.clock.sleep(5)
        await api.post(f"/sessions/{session}/finish", SUCCESS)
    async with world.server() as api:
        assert await api.loss(future) > 0
        await api.clock.sleep(1)
        worker = api.server._parts.worker
        assert worker.held() == dict.fromkeys(worker.held(), 0)
        assert world.engine.adapters == ()
        assert world.disk == {}


async def test_a_heartbeat_that_races_with_the_end_revives_nobody(api: Api) -> None:
    session = await api.session()
    statuses: list[int] = []

    async def beat() -> None:
        reply = await api.call("POST", "/session_heartbeat", {"session_id": session})
        statuses.append(reply.status)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(beat)
        group.start_soon(api.post, f"/sessions/{session}/finish", SUCCESS)
    await beat()
    assert statuses[-1] == 410
    (found,) = await api.server.store.sessions()
    assert not found.active


async def test_silence_while_the_server_was_away_ends_no_session() -> None:
    world = World(session_timeout_s=100)
    async with world.server() as api:
        session = await api.session()
    await world.clock.advance(10_000)
    async with world.server() as api:
        await api.clock.sleep(60)
        await api.post("/session_heartbeat", {"session_id": session})
        await api.clock.sleep(200)
        reply = await api.call("POST", "/session_heartbeat", {"session_id": session})
        assert reply.status == 410


async def test_gradients_of_other_models_do_not_mix(api: Api) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(3)]
    for model in models:
        await api.train(model, 1, datum([1, 2, 3]))
    norms = {(await api.result(await api.step(m, 2)))["metrics"]["grad_norm"] for m in models}
    assert len(norms) == 1
