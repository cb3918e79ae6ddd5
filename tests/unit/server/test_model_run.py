"""Two tenants, two models: what happens to one never happens to the other, whenever what dies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import anyio
import msgspec
import pytest

from tinkex.errors import EngineDiedError, RequestFailedError
from tinkex.server.scheduler.engine_access import EngineAccess
from tinkex.testing import FakeClock, FakeEngine
from tinkex.testing.fake_engine import Delays
from tinkex.transport.base import HttpRequest, Pool

from .conftest import Api, datum
from .mortal import Fate, World, logprobs, publish, save_state, train

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio

KEEP = {"snapshot_ops": 10_000, "snapshot_s": 1e9}
SUCCESS = {"reason": {"type": "success"}}
POISON = [6, 6, 6]

Dies = Literal["engine", "server"]


def poison(world: World) -> None:
    """Let the engine die whenever it trains on the poison, in this life of the server."""
    inner, engine = type(world.engine).train, world.engine

    async def deadly(batch: Any) -> Any:
        if any(list(op.data[0].model_input.to_ints()) == POISON for op in batch):
            engine.die()
            raise EngineDiedError("the engine was killed")
        return await inner(engine, batch)

    engine.train = deadly  # type: ignore[method-assign]


async def unload(api: Api, model: str, seq: int) -> Any:
    key = {"x-idempotency-key": f"unload {model}"}
    return await api.post("/unload_model", {"model_id": model, "seq_id": seq}, headers=key)


async def refusal(api: Api, sampler: str) -> str:
    """What is said to a sample from weights that are gone."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler, "seq_id": 99, "num_samples": 1, "prompt": prompt}
    reply = await api.call("POST", "/asample", {**body, "sampling_params": {"max_tokens": 4}})
    assert reply.status == 400
    return reply.body.decode()


# -- one at a time -----------------------------------------------------------------------------


async def test_a_poisoned_model_takes_no_other_tenants_model_with_it() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        other = api.other()
        bad, good = await api.model(), await other.model()
        await api.result(await api.train(bad, 1, datum(POISON)))
        await other.result(await other.train(good, 1))
        poison(world)
        world.engine.die()
        futures = await api.train(bad, 2), await other.train(good, 2)
        assert "brought back" in (await api.outcome(futures[0]))["error"]
        assert await other.loss(futures[1]) > 0
        await other.result(await other.step(good, 3))
        assert api.server._parts.worker.held()["suspects"] == 0


async def test_a_model_that_kills_the_engine_when_it_is_saved_is_given_up_alone() -> None:
    world = World(snapshot_ops=2)
    async with world.server() as api:
        other = api.other()
        bad, good = await api.model(), await other.model()
        inner, engine = type(world.engine).save_adapter, world.engine

        async def deadly(model_id: str, location: str, *, optimizer: bool) -> Any:
            if model_id == bad:
                engine.die()
                raise EngineDiedError("the engine was killed")
            return await inner(engine, model_id, location, optimizer=optimizer)

        engine.save_adapter = deadly  # type: ignore[method-assign]
        seq, outcome = 0, dict[str, Any]()
        while "error" not in outcome:
            seq += 1
            await other.result(await other.train(good, seq))
            outcome = await api.outcome(await api.train(bad, seq))
            assert seq < 10
        assert "each time" in outcome["error"]
        await other.result(await other.step(good, seq + 1))


async def test_a_sampler_whose_file_kills_the_engine_is_given_up_alone() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        model = await api.model()
        await train(api, model, 1, 1)

        async def deadly(*args: Any) -> Any:
            world.engine.die()
            raise EngineDiedError("the engine was killed")

        inner = world.engine.save_snapshot
        world.engine.save_snapshot = deadly  # type: ignore[method-assign]
        sampler = await publish(api, model, 4, 0)
        for seq in (5, 6, 7):
            await api.result(await api.train(model, seq))
        world.engine.save_snapshot = inner  # type: ignore[method-assign]
        assert "the engine died each time" in await refusal(api, sampler)
        await logprobs(api, await publish(api, model, 8, 1), 0)


async def test_whoever_samples_by_himself_does_not_run_beside_a_suspect() -> None:
    access = EngineAccess(FakeEngine(FakeClock()), most_deaths=3)
    for _ in range(2):
        access.blame("a suspect")
    order: list[str] = []
    async with anyio.create_task_group() as group:

        async def suspect() -> None:
            async with access.running(["a suspect"]):
                order.append("suspect begins")
                await anyio.lowlevel.checkpoint()
                order.append("suspect ends")

        async def innocent() -> None:
            async with access.running(["a sample"]):
                order.append("sample")

        group.start_soon(suspect)
        group.start_soon(innocent)
    assert order == ["suspect begins", "suspect ends", "sample"]


async def test_openai_samples_run_where_the_engine_is_watched(monkeypatch: Any) -> None:
    world, seen = World(), list[str]()
    inner = EngineAccess.running

    def watched(self: EngineAccess, names: Any) -> Any:
        seen.extend(names)
        return inner(self, names)

    monkeypatch.setattr(EngineAccess, "running", watched)
    async with world.server() as api:
        body = {"model": "tinkex/tiny", "prompt": [1, 2, 3], "max_tokens": 2}
        headers = {"authorization": f"Bearer {api.key}"}
        data = msgspec.json.encode(body)
        request = HttpRequest("POST", "/v1/completions", Pool.REST, 3600, "", headers, data)
        reply = await api.transport.send(request)
        assert reply.status == 200, reply
        assert len(seen) == 1


async def test_a_published_sampler_outlives_unloading_its_model_and_a_crash() -> None:
    world = World(**KEEP)
    async with world.server(delays=Delays(save_s=100)) as api:
        model = await api.model()
        await train(api, model, 1, 2)
        sampler = await publish(api, model, 7, 0)
        frozen = await logprobs(api, sampler, 0)
        unloading = await unload(api, model, 8)
        await api.clock.sleep(5)  # its file is being written
    async with world.server() as api:
        await api.result(unloading)
        assert await logprobs(api, sampler, 1) == frozen
        assert world.engine.adapters == ()


async def test_a_load_that_failed_has_not_loaded() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        session = await api.session()
        model, other = await api.model(session, 0), await api.model(session, 1)
        await train(api, other, 1, 3)
        path = await save_state(api, other, 10)
        before = await api.loss(await api.train(model, 1))
        broken = RequestFailedError("the disk is read-only", None, "server")
        world.engine.fail_next("save_adapter", broken)
        body = {"model_id": model, "seq_id": 2, "path": path, "optimizer": False}
        assert "read-only" in (await api.outcome(await api.post("/load_weights", body)))["error"]
        assert await api.loss(await api.train(model, 3)) == before
        world.engine.die()
        assert await api.loss(await api.train(model, 4)) == before


async def sampler_bytes(api: Api) -> int:
    """What the saved files of a tenant's samplers take up."""
    located = await api.server.store.samplers(located=True)
    return sum(each.size_bytes for each in located if each.owner == api.owner)


async def test_an_old_sampler_goes_before_the_quota_is_full_and_says_so() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        model = await api.model()
        first = await publish(api, model, 1, 0)
        await logprobs(api, first, 0)
        await api.clock.sleep(1)
        size = await sampler_bytes(api)
        assert size > 0
    world.settings = type(world.settings)(
        session_timeout_s=1e9, max_stored_bytes=3 * size + 6_000, **KEEP
    )
    async with world.server() as api:
        used = await publish(api, model, 2, 1)
        for number in range(2, 20):
            await api.clock.sleep(1)
            last = await publish(api, model, number + 1, number)
            await logprobs(api, used, number)  # a reference policy stays
        await api.clock.sleep(1)
        files = [name for name in world.disk if name.startswith("sampler/")]
        assert len(files) <= 3
        assert {f"sampler/{used}", f"sampler/{last}"} <= set(files)
        assert "deleted them to make room" in await refusal(api, first)
        assert await sampler_bytes(api) <= 3 * size


async def test_ending_a_session_with_many_samplers_commits_a_few_times() -> None:
    world = World(**KEEP)
    async with world.server() as api:
        session = await api.session()
        model = await api.model(session)
        for number in range(50):
            await publish(api, model, number + 1, number)
        await api.clock.sleep(1)
        assert len(world.disk) == 50
        writes = world.fate.calls
        closed: list[int] = []
        inner = world.store.close_samplers

        async def counted(sampler_ids: Any, *why: str) -> None:
            closed.append(len(list(sampler_ids)))
            await inner(sampler_ids, *why)

        world.store.close_samplers = counted  # type: ignore[method-assign]
        await api.post(f"/sessions/{session}/finish", SUCCESS)
        assert world.fate.calls - writes <= 3  # before the answer: the session's end, no sampler
        await api.clock.sleep(1)
        assert closed[0] == 50
        assert world.disk == {}
        held = api.server._parts.worker.held()
        assert held == dict.fromkeys(held, 0)


async def test_a_step_waits_for_the_gradient_that_is_still_being_uploaded() -> None:
    world = World(gap_timeout_s=60, upload_timeout_s=120)
    async with world.server() as api:
        model = await api.model()
        worker = api.server._parts.worker
        with worker.arriving(api.owner):
            step = await api.step(model, 2)
            await api.clock.sleep(110)
            assert b"try_again" in (await api.poll(step)).body
            late = await api.train(model, 1)
        assert await api.loss(late) > 0
        assert (await api.result(step))["metrics"]["step"] == 1


async def test_an_upload_that_fails_holds_nothing_up_for_longer() -> None:
    world = World(gap_timeout_s=60)
    async with world.server() as api:
        model = await api.model()
        with api.server._parts.worker.arriving(api.owner):
            step = await api.step(model, 2)
            await api.clock.sleep(100)
        begun = api.clock.now()
        await api.result(step)
        assert api.clock.now() == begun


# -- at every call -----------------------------------------------------------------------------


class Stubborn(Api):
    """Sends again what the server could not accept."""

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        while (reply := await super().call(method, path, body, **options)).status >= 500:
            await self.clock.sleep(1)
        return reply


class Story:
    """What two clients do, told again after each death of the server from where it broke off."""

    settings: ClassVar[dict[str, Any]] = KEEP

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: dict[str, Any] = {}

    async def tell(self, api: Api) -> None:
        one = Stubborn(api.server, api.clock, "tml-one")
        await self.told(one, Stubborn(api.server, api.clock, "tml-two"))

    async def told(self, one: Api, two: Api) -> None:
        raise NotImplementedError

    async def once(self, key: str, act: Callable[[], Awaitable[Any]]) -> Any:
        """What was acknowledged stays so."""
        if key not in self.known:
            self.known[key] = await act()
        return self.known[key]

    async def model(self, api: Api, name: str) -> str:
        session = await self.once(f"session {name}", api.session)
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tinkex/tiny"}
        body["lora_config"] = {"rank": 8}

        async def create() -> str:
            return (await api.result(await api.post("/create_model", body)))["model_id"]

        return await self.once(f"model {name}", create)

    async def bytes_of(self, key: str, api: Api, send: Callable[[], Awaitable[Any]]) -> bytes:
        """An operation's answer as it came."""

        async def answer() -> bytes:
            future = await send()
            while b"try_again" in (reply := await api.poll(future)).body:
                pass
            assert reply.status == 200, reply
            return reply.body

        return await self.once(key, answer)

    async def steps(self, api: Api, name: str, model: str, first: int, count: int) -> None:
        for seq in range(first, first + 2 * count, 2):
            await self.bytes_of(
                f"{name} {seq}", api, partial(api.train, model, seq, datum([seq, 2, 3]))
            )
            await self.bytes_of(f"{name} {seq + 1}", api, partial(api.step, model, seq + 1))

    def outcome(self) -> Any:
        """What must be the same whatever dies. Sessions whose answer was lost are made again."""
        text = repr({k: v for k, v in self.known.items() if not k.startswith("session")})
        for key, value in self.known.items():
            if key.startswith("session"):
                text = text.replace(value, key)
        return text


class Publishing(Story):
    """One publishes, unloads and samples; the other trains and samples meanwhile."""

    async def told(self, one: Api, two: Api) -> None:
        first, second = await self.model(one, "one"), await self.model(two, "two")
        await self.steps(one, "one", first, 1, 1)
        sampler = await self.once("sampler", lambda: publish(one, first, 3, 0))
        unloading = await self.once("unloading", lambda: unload(one, first, 4))
        await self.steps(two, "two", second, 1, 1)
        other = await self.once("other sampler", lambda: publish(two, second, 3, 0))
        await self.once("unloaded", lambda: one.result(unloading))
        number = len(one.server.requests)  # a number that no earlier life used
        self.known["frozen"] = await logprobs(one, sampler, number)
        self.known["frozen other"] = await logprobs(two, other, number)
        await self.steps(two, "two", second, 4, 1)


class Loading(Story):
    """One loads, which fails after the weights are there; the other loads well."""

    async def told(self, one: Api, two: Api) -> None:
        first, second = await self.model(one, "one"), await self.model(two, "two")
        await self.steps(one, "one", first, 1, 2)
        await self.steps(two, "two", second, 1, 2)
        path = await self.once("path", lambda: save_state(one, first, 5))
        mine = await self.once("other path", lambda: save_state(two, second, 5))
        await self.steps(one, "one", first, 6, 1)
        await self.steps(two, "two", second, 6, 1)
        self._break(first)
        loading = {"model_id": first, "seq_id": 8, "path": path, "optimizer": True}
        await self.bytes_of("one loads", one, lambda: one.post("/load_weights", loading))
        loading = {"model_id": second, "seq_id": 8, "path": mine, "optimizer": True}
        await self.bytes_of("two loads", two, lambda: two.post("/load_weights", loading))
        await self.steps(one, "one", first, 9, 1)
        await self.steps(two, "two", second, 9, 1)

    def _break(self, model: str) -> None:
        """No snapshot of a model can be written from now on."""
        engine = self.world.engine
        inner = type(engine).save_adapter

        async def broken(model_id: str, location: str, *, optimizer: bool) -> Any:
            if model_id == model:
                raise RequestFailedError("the disk is read-only", None, "server")
            return await inner(engine, model_id, location, optimizer=optimizer)

        engine.save_adapter = broken  # type: ignore[method-assign]


class Poisoned(Story):
    """One has a model that kills the engine when it is brought back; the other only trains."""

    async def told(self, one: Api, two: Api) -> None:
        bad, good = await self.model(one, "one"), await self.model(two, "two")
        await self.steps(two, "two", good, 1, 1)
        if "bad" not in self.known:
            await self.bytes_of("bad", one, lambda: one.train(bad, 1, datum(POISON)))
        poison(self.world)
        if self.known.setdefault("killed", self.world.engine) is self.world.engine:
            self.world.engine.die()
        sent = await self.once("future", lambda: one.train(bad, 2))
        await self.steps(two, "two", good, 3, 2)
        assert "brought back" in (await one.outcome(sent))["error"]
        await self.steps(two, "two", good, 7, 1)

    def outcome(self) -> Any:
        return {key: value for key, value in self.known.items() if key.startswith("two")}


class Ending(Story):
    """One publishes more than there is room for and leaves; the other keeps what it has."""

    settings: ClassVar[dict[str, Any]] = {**KEEP, "max_stored_bytes": 20_000}

    async def told(self, one: Api, two: Api) -> None:
        first, second = await self.model(one, "one"), await self.model(two, "two")
        kept = await self.once("kept", lambda: publish(two, second, 1, 0))
        for number in range(4):
            await self.once(f"sampler {number}", partial(publish, one, first, number + 1, number))
            await one.clock.sleep(1)
        session = self.known["session one"]

        async def finish() -> bool:
            await one.call("POST", f"/sessions/{session}/finish", SUCCESS)
            return True

        await self.once("finished", finish)
        await one.clock.sleep(60)
        self.known["frozen"] = await logprobs(two, kept, len(two.server.requests))
        await self.steps(two, "two", second, 2, 1)
        files = {name for name in self.world.disk if not name.startswith("snapshot/")}
        assert files == {f"sampler/{kept}"}
        assert set(self.world.engine.adapters) <= {second}


async def lived(story: type[Story], fate: Fate) -> tuple[Any, int]:
    world = World(fate, max_engine_deaths=3, **story.settings)
    told = story(world)
    await world.live(told.tell)
    return told.outcome(), fate.calls


@pytest.mark.parametrize("dies", ["engine", "server"])
@pytest.mark.parametrize("story", [Publishing, Loading, Poisoned, Ending])
async def test_a_death_at_any_call_changes_nothing(story: type[Story], dies: Dies) -> None:
    calm, calls = await lived(story, Fate())
    for number in range(1, calls + 1):
        for when in ("before", "after"):
            fate = Fate(**{f"{dies}_dies": {number: when}})
            disturbed, _ = await lived(story, fate)
            assert disturbed == calm, f"{dies} died {when} call {number}"
