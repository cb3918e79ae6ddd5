"""Engine and server may die at any step: clients notice a delay, and the numbers stay the same."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tinkex.errors import EngineDiedError
from tinkex.testing.fake_engine import Delays

from .conftest import Api, datum
from .mortal import Fate, World, logprobs, publish, save_state, train

pytestmark = pytest.mark.anyio

KEEP = {"snapshot_ops": 10_000, "snapshot_s": 1e9}


def saved(world: World, path: str, seq: int) -> dict[str, Any]:
    """Everything that was saved of a model, gradient included."""
    state, _ = world.disk[f"{path}@{seq}"]
    fields = ("bias", "first", "second", "step", "gradient")
    return {name: np.asarray(getattr(state, name), float).tobytes() for name in fields}


async def undisturbed(steps: int, extra: int = 0) -> tuple[list[bytes], dict[str, Any]]:
    """The answers and the final state of a run that nobody disturbs; `extra` passes at the end."""
    world = World()
    async with world.server() as api:
        model = await api.model()
        answers = await train(api, model, 1, steps)
        for number in range(extra):
            await api.result(await api.train(model, 3 * steps + 1 + number))
        seq = 3 * steps + extra + 1
        return answers, saved(world, await save_state(api, model, seq), seq)


@pytest.mark.parametrize("settings", [KEEP, {"snapshot_ops": 2}], ids=["journal", "snapshots"])
async def test_after_the_engine_died_the_run_goes_on_to_the_same_bits(
    settings: dict[str, Any],
) -> None:
    world = World(**settings)
    async with world.server() as api:
        model = await api.model()
        answers = await train(api, model, 1, 3)
        world.engine.die()
        answers += await train(api, model, 10, 2)
        assert world.engine.adapters == (model,)
        state = saved(world, await save_state(api, model, 16), 16)
    assert (answers, state) == await undisturbed(5)


async def test_a_gradient_that_was_accumulated_survives_too() -> None:
    world = World(snapshot_ops=2)
    async with world.server() as api:
        model = await api.model()
        answers = await train(api, model, 1, 2)
        for seq in (7, 8, 9):
            await api.result(await api.train(model, seq))
        world.engine.die()
        state = saved(world, await save_state(api, model, 10), 10)
    assert (answers, state) == await undisturbed(2, extra=3)


@pytest.mark.parametrize("settings", [KEEP, {"snapshot_ops": 2}], ids=["journal", "snapshots"])
async def test_after_a_restart_of_the_server_the_run_goes_on_to_the_same_bits(
    settings: dict[str, Any],
) -> None:
    world = World(**settings)
    async with world.server() as api:
        model = await api.model()
        answers = await train(api, model, 1, 3)
    async with world.server() as api:
        answers += await train(api, model, 10, 2)
        state = saved(world, await save_state(api, model, 16), 16)
    assert (answers, state) == await undisturbed(5)


async def test_what_was_accepted_before_a_restart_runs_after_it() -> None:
    world = World()
    async with world.server(delays=Delays(train_s=10)) as api:
        model = await api.model()
        futures = [await api.train(model, 1), await api.step(model, 2), await api.train(model, 3)]
        await api.clock.sleep(5)  # the first one runs
    async with world.server() as api:
        losses = [await api.loss(future) for future in (futures[0], futures[2])]
        assert losses[0] > losses[1]
        assert (await api.result(futures[1]))["metrics"]["step"] == 1
        assert await api.train(model, 1) == futures[0]


async def test_an_operation_runs_again_when_the_engine_dies_under_it() -> None:
    world = World()
    async with world.server(delays=Delays(train_s=10)) as api:
        model = await api.model()
        future = await api.train(model, 1)
        await api.clock.sleep(5)
        world.engine.die()
        assert await api.loss(future) > 0
        # The first try, until it noticed its death, and the second one.
        assert api.clock.now() == 20


async def test_a_sample_runs_again_when_the_engine_dies_under_it() -> None:
    world = World()
    async with world.server(delays=Delays(sample_s=10)) as api:
        sampler = await api.sampler(await api.session())
        future = await api.sample(sampler)
        await api.clock.sleep(5)
        world.engine.die()
        await api.sampled(future)


def kill_on(world: World, tokens: list[int]) -> list[int]:
    """Let the engine die whenever it is to train on these tokens; counts how often."""
    deaths: list[int] = []
    inner = type(world.engine).train

    async def train(batch: Any) -> Any:
        for op in batch:
            if list(op.data[0].model_input.to_ints()) == tokens:
                deaths.append(len(batch))
                world.engine.die()
                raise EngineDiedError("the engine was killed")
        return await inner(world.engine, batch)

    world.engine.train = train  # type: ignore[method-assign]
    return deaths


async def test_an_operation_that_kills_the_engine_fails_and_the_others_go_on() -> None:
    world = World()
    async with world.server(delays=Delays(sample_s=3)) as api:
        session = await api.session()
        first, second = await api.model(session, 0), await api.model(session, 1)
        sampler = await api.sampler(session, 9)
        deaths = kill_on(world, [6, 6, 6])
        bad = await api.train(first, 1, datum([6, 6, 6]))
        good = [await api.train(second, 1), await api.train(first, 2), await api.sample(sampler)]
        failed = await api.outcome(bad)
        assert failed["category"] == "server"
        assert "the engine died each time" in failed["error"]
        for future in good:
            await api.result(future)
        assert len(deaths) == 3
        assert deaths[-1] == 1  # the last one had nobody else to blame
        assert not any(api.server._parts.worker.held()[key] for key in ("suspects", "samples"))


async def test_long_polls_wait_while_the_engine_is_away() -> None:
    world = World(long_poll_s=25)
    async with world.server() as api:
        model = await api.model()
        ready = anyio.Event()
        world.engine.wait_ready = ready.wait  # type: ignore[attr-defined]
        future = await api.train(model, 1)
        answer = msgspec.json.decode((await api.poll(future)).body)
        assert answer["type"] == "try_again"
        assert api.clock.now() == 25
        ready.set()
        assert await api.loss(future) > 0


async def test_a_sampling_client_is_a_frozen_snapshot_whatever_happens() -> None:
    world = World(snapshot_ops=2)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 1)
        sampler = await publish(api, model, 4, 0)
        frozen = await logprobs(api, sampler, 0)
        await train(api, model, 5, 1)
        assert await logprobs(api, sampler, 1) == frozen
        world.engine.die()
        assert await logprobs(api, sampler, 2) == frozen
        await train(api, model, 8, 2)
    async with world.server() as api:
        assert await logprobs(api, sampler, 3) == frozen
        later = await publish(api, model, 14, 1)
        assert await logprobs(api, later, 0) != frozen


async def test_weights_published_a_moment_before_a_crash_are_published_again() -> None:
    world = World(**KEEP)
    async with world.server(delays=Delays(save_s=100)) as api:
        model = await api.model()
        await train(api, model, 1, 1)
        sampler = await publish(api, model, 4, 0)
        frozen = await logprobs(api, sampler, 0)
        await train(api, model, 5, 1)
        assert f"sampler/{sampler}" not in world.disk
        world.engine.die()
        assert await logprobs(api, sampler, 1) == frozen
    async with world.server() as api:
        assert await logprobs(api, sampler, 2) == frozen
        await api.clock.sleep(1)
        assert f"sampler/{sampler}" in world.disk


async def test_a_save_that_is_run_again_finds_its_own_checkpoint() -> None:
    fate = Fate()
    world = World(fate)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 1)
    counted = fate.calls
    for offset in range(1, 30):
        fate.server_dies = {counted + offset: "before" if offset % 2 else "after"}
        seq, name = 3 + offset, f"save-{offset}"

        async def story(api: Api, seq: int = seq, name: str = name) -> None:
            assert (await save_state(api, model, seq, name)).endswith(name)

        await world.live(story)
        counted = fate.calls


async def test_a_load_survives_the_deletion_of_its_checkpoint() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 2)
        path = await save_state(api, model, 7)
        session = await api.session()
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        other = (await api.result(await api.post("/load_weights", body)))["model_id"]
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        reply = await api.call("DELETE", f"/training_runs/{run}/checkpoints/{checkpoint}")
        assert reply.status == 200
        world.engine.die()
        step = (await api.result(await api.step(other, 1)))["metrics"]["step"]
        assert step == 3
    async with world.server() as api:
        assert (await api.result(await api.step(other, 2)))["metrics"]["step"] == 4


async def test_a_cancelled_turn_is_not_waited_for_after_a_restart() -> None:
    world = World()
    async with world.server(delays=Delays(train_s=100)) as api:
        model = await api.model()
        running = await api.train(model, 1)
        await api.clock.sleep(1)
        withdrawn = await api.train(model, 3)
        assert await api.post("/cancel_future", withdrawn) == {"cancelled": True}
    async with world.server() as api:
        await api.result(running)
        begun = api.clock.now()
        step = await api.step(model, 2)
        following = await api.train(model, 4)
        await api.result(step)
        await api.result(following)
        assert api.clock.now() == begun
        assert (await api.outcome(withdrawn))["category"] == "user"


async def test_a_model_that_was_not_created_or_was_unloaded_stays_away() -> None:
    world = World()
    async with world.server() as api:
        world.engine.fail_next("create_adapter", MemoryError("no room"))
        body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": "tinkex/tiny"}
        created = await api.post("/create_model", body)
        assert "no room" in (await api.outcome(created))["error"]
        gone = await api.model()
        await api.result(await api.post("/unload_model", {"model_id": gone}))
    async with world.server() as api:
        failed = await api.outcome(await api.train(created["model_id"], 1))
        assert "no room" in failed["error"]
        failed = await api.outcome(await api.train(gone, 2))
        assert "unloaded" in failed["error"]
        assert world.engine.adapters == ()


async def test_samples_in_flight_are_announced_as_lost_after_a_restart() -> None:
    world = World()
    async with world.server(delays=Delays(sample_s=100)) as api:
        sampler = await api.sampler(await api.session())
        futures = [await api.sample(sampler, seq) for seq in range(3)]
        chosen = {"type": "sampling_session", "sampling_session_id": sampler}
        target = {"target": {**chosen, "cloned_sampler_id": 0}, "prev_cursor": 0}
    async with world.server() as api:
        await api.result(await api.sample(sampler, 3))  # sent before the client asks
        page = await api.post("/retrieve_futures", target)
        told = {c["request_id"] for c in page["completions"] if c["state"] == "failed"}
        assert {f["request_id"] for f in futures} <= told
        assert [(await api.poll(future)).status for future in futures] == [410] * 3
        page = await api.post("/retrieve_futures", {**target, "prev_cursor": page["cursor"]})
        assert [c["request_id"] for c in page["completions"]] == [f"{sampler}:3"]


async def test_a_cursor_from_before_a_restart_misses_nothing() -> None:
    world = World()
    chosen = {"type": "sampling_session", "cloned_sampler_id": 0}
    async with world.server() as api:
        sampler = await api.sampler(await api.session())
        for seq in range(5):
            await api.result(await api.sample(sampler, seq))
        target = {**chosen, "sampling_session_id": sampler}
        page = await api.post("/retrieve_futures", {"target": target, "prev_cursor": 0})
        assert len(page["completions"]) == 5
    async with world.server() as api:
        await api.result(await api.sample(sampler, 5))
        body = {"target": target, "prev_cursor": page["cursor"]}
        lost = await api.post("/retrieve_futures", body)
        page = await api.post(
            "/retrieve_futures", {"target": target, "prev_cursor": lost["cursor"]}
        )
        assert [c["request_id"] for c in page["completions"]] == [f"{sampler}:5"]


async def test_an_answer_of_an_engine_that_does_not_know_the_model_is_no_answer() -> None:
    world = World()
    async with world.server() as api:
        model = await api.model()
        before = await api.loss(await api.train(model, 1))
        inner = world.engine.train

        async def restarted_meanwhile(batch: Any) -> Any:
            world.engine.train = inner  # type: ignore[method-assign]
            world.engine.die()
            return await inner(batch)  # which says that there is no such model

        world.engine.train = restarted_meanwhile  # type: ignore[method-assign]
        assert await api.loss(await api.train(model, 2)) == before


async def test_no_snapshot_passes_published_weights_that_are_not_on_disk() -> None:
    world = World(snapshot_ops=1)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 1)
        room = anyio.Event()
        inner = world.engine.save_snapshot

        async def slow(*args: Any) -> Any:
            await room.wait()
            return await inner(*args)

        world.engine.save_snapshot = slow  # type: ignore[method-assign]
        sampler = await publish(api, model, 4, 0)
        frozen = await logprobs(api, sampler, 0)
        await train(api, model, 5, 2)
        world.engine.die()
        room.set()
        assert await logprobs(api, sampler, 1) == frozen
        await train(api, model, 11, 1)
        kept = await world.store.get_model(model)
        assert kept is not None
        assert kept.snapshot_seq > 4


async def test_a_model_that_kills_the_engine_when_it_is_restored_is_given_up() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        session = await api.session()
        bad, good = await api.model(session, 0), await api.model(session, 1)
        await api.result(await api.train(bad, 1, datum([6, 6, 6])))
        deaths = kill_on(world, [6, 6, 6])
        world.engine.die()
        failed = await api.outcome(await api.train(bad, 2))
        assert "brought back" in failed["error"]
        assert len(deaths) == 3
        assert "brought back" in (await api.outcome(await api.step(bad, 3)))["error"]
        assert len(deaths) == 3
        await api.result(await api.train(good, 1))


async def test_a_sampler_whose_session_has_ended_is_not_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its outcome was not stored, so it runs again; nothing would drop it after that."""
    world = World()
    async with world.server() as api:
        session = await api.session()
        model = await api.model(session)
        with monkeypatch.context() as patch:
            patch.setattr(world.store, "finish", lambda *_: anyio.sleep_forever())
            body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
            future = await api.post("/save_weights_for_sampler", body)
            await api.clock.sleep(1)
            await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
            await api.clock.sleep(1)
            world.fate.buried.set()
    (sampler,) = await world.store.samplers(session)
    assert sampler.dropped is not None
    world.fate.buried = anyio.Event()
    async with world.server() as api:
        assert (await api.result(future))["sampling_session_id"] == sampler.sampler_id
        await api.clock.sleep(60)
        held = api.server._parts.worker.held()
        assert held == dict.fromkeys(held, 0)
        assert not world.engine._snapshots
        assert not world.disk


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_sampler_that_ends_while_it_is_written_is_no_suspect(ends_first: bool) -> None:
    """The engine died while it was written; after its session nothing is left of that."""
    world = World()
    async with world.server(delays=Delays(save_s=5)) as api:
        session = await api.session()
        await publish(api, await api.model(session), 1, 0)
        await api.clock.sleep(1)
        for number in (0, 1):
            if number == ends_first:
                world.engine.die()
            else:
                await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
            await api.clock.sleep(1)
        await api.clock.sleep(60)
        held = api.server._parts.worker.held()
        assert held == dict.fromkeys(held, 0)
        assert not world.disk
