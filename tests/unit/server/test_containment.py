"""A failure of one tenant's work ends there: others go on, and readiness tells the truth."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tinkex.engine.process.calls import METHODS
from tinkex.server import Settings
from tinkex.server.scheduler.plan import Queue
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeClock, FakeEngine, FakeServer
from tinkex.testing.fake_engine import Delays
from tinkex.transport.base import HttpRequest, Pool

from .conftest import Api, datum

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio

SUCCESS = {"reason": {"type": "success"}}
SETTINGS = {"snapshot_ops": 3, "snapshot_s": 1e9, "session_timeout_s": 1e9}


async def page(api: Api, path: str) -> Reply:
    """One of the operators' pages."""
    return await api.transport.send(HttpRequest("GET", path, Pool.REST, 3600, "", {}, None))


async def is_ready(api: Api) -> bool:
    return (await page(api, "/readyz")).status == 200


# -- one number ---------------------------------------------------------------------------------


async def test_the_largest_number_of_a_model_ends_nothing_but_that_model(tmp_path: Path) -> None:
    """The worker once ended when a model was closed whose number no database can store."""
    clock = FakeClock()
    async with SqlStore.open(tmp_path / "store.db") as store:
        engine = FakeEngine(clock)
        server = FakeServer(clock=clock, engine=engine, store=store)  # type: ignore[arg-type]
        async with server:
            api = Api(server, clock)
            session = await api.session()
            model = await api.model(session)
            worker = server._parts.worker
            (await worker._run_of(model)).queue.last_seq = (1 << 63) - 1
            body = {"model_id": model, "adam_params": {}, "type": "optim_step"}
            refused = await api.call("POST", "/optim_step", body)
            assert refused.status == 400
            assert b"used up" in refused.body
            await api.post(f"/sessions/{session}/finish", SUCCESS)
            while worker.held()["models"]:
                await anyio.lowlevel.checkpoint()
            assert await is_ready(api)
            other = api.other()
            assert await other.loss(await other.train(await other.model(), 1)) > 0


# -- a dependency fails at any call ---------------------------------------------------------------

ERRORS = (RuntimeError, OverflowError, MemoryError, KeyError, asyncio.CancelledError)
STORE_METHODS = [
    name
    for name, value in vars(MemoryStore).items()
    if inspect.iscoroutinefunction(value) and not name.startswith("_")
]
# Not of the scheduler: what a route does alone answers an error to that route.
_LISTS = {"keys", "audit_log", "usage", "session_ids", "find_key"}


@dataclass
class Sabotage:
    """Counts the calls of the scheduler or of requests; one fails with an unexpected error."""

    at: int = 0
    error: type[BaseException] = RuntimeError
    after: bool = False
    in_request: bool = False
    in_background: bool = True
    counting: bool = False
    calls: list[str] = field(default_factory=list)

    async def meet(self, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        fails = False
        if self.counting and (self.in_background if _in_background() else self.in_request):
            self.calls.append(name)
            fails = len(self.calls) == self.at
        await anyio.lowlevel.checkpoint()
        if fails and not self.after:
            raise self.error("sabotage")
        result = await act()
        if fails:
            raise self.error("sabotage")
        return result


def _in_background() -> bool:
    """Whether no request is being handled: those are answered with their errors."""
    task = asyncio.current_task()
    return task is not None and not task.get_name().startswith("client")


class SabotagedStore(MemoryStore):
    sabotage: Sabotage


class SabotagedEngine(FakeEngine):
    sabotage: Sabotage


def _sabotaged(kind: type, name: str) -> Any:
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        act = partial(getattr(kind, name), self, *args, **options)
        return await self.sabotage.meet(f"{kind.__name__}.{name}", act)

    return call


for _name in set(STORE_METHODS) - _LISTS:
    setattr(SabotagedStore, _name, _sabotaged(MemoryStore, _name))
for _name in METHODS - {"stats"}:
    setattr(SabotagedEngine, _name, _sabotaged(FakeEngine, _name))


class Tenant:
    """What one tenant does; every answer is recorded, errors too."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.answers: dict[str, Any] = {}

    async def ended(self, name: str, future: Any) -> Any:
        body = await self.api.outcome(future)
        self.answers[name] = body
        return body

    async def steps(self, model: str, first: int, count: int) -> None:
        sent = []
        for seq in range(first, first + 3 * count, 3):
            sent += [
                await self.api.train(model, seq, datum([seq, 2, 3])),
                await self.api.train(model, seq + 1, datum([4, seq])),
                await self.api.step(model, seq + 2),
            ]
        for number, future in enumerate(sent):
            await self.ended(f"step {first + number}", future)

    async def live(self) -> None:
        """Create, train, publish, sample, save, load, unload, finish."""
        api = self.api
        session = await api.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tinkex/tiny"}
        body["lora_config"] = {"rank": 8}
        created = await self.ended("create", await api.post("/create_model", body))
        model = created.get("model_id", f"{session}:train:0")
        await self.steps(model, 1, 2)
        body = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0}
        saved = await self.ended("publish", await api.post("/save_weights_for_sampler", body))
        if "error" not in saved:
            sampler = saved["sampling_session_id"]
            asked = await api.call("POST", "/asample", _sample(sampler))
            self.answers["asked"] = asked.status
            if asked.status == 200:
                await self.ended("sample", msgspec.json.decode(asked.body))
        body = {"model_id": model, "seq_id": 8, "path": "kept", "overwrite": False}
        kept = await self.ended("save", await api.post("/save_weights", body))
        await self.steps(model, 9, 1)
        if "error" not in kept:
            body = {"model_id": model, "seq_id": 12, "path": kept["path"], "optimizer": True}
            await self.ended("load", await api.post("/load_weights", body))
            await self.steps(model, 13, 1)
        await api.post(f"/sessions/{session}/finish", SUCCESS)


def _sample(sampler: str) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1},
        "prompt_logprobs": True,
    }


@dataclass
class Told:
    """How a story of two tenants has ended."""

    answers: list[dict[str, Any]]
    ready: bool
    held: dict[str, int]
    calls: list[str]


async def told(sabotage: Sabotage) -> Told:
    clock = FakeClock()
    store = SabotagedStore(clock)
    engine = SabotagedEngine(clock, delays=Delays(train_s=1, optim_s=1, save_s=1))
    store.sabotage = engine.sabotage = sabotage
    server = FakeServer(clock=clock, engine=engine, store=store, settings=Settings(**SETTINGS))
    before = asyncio.all_tasks()
    async with clock.running(), server:
        tenants = [Tenant(Api(server, clock, f"tml-{name}")) for name in ("one", "two")]
        await anyio.lowlevel.checkpoint()
        sabotage.counting = True
        async with anyio.create_task_group() as group:
            for tenant in tenants:
                group.start_soon(tenant.live, name="client")
        asyncio.current_task().set_name("client")  # type: ignore[union-attr]
        await clock.sleep(700)  # a prune and many sweeps
        sabotage.counting = False
        api = tenants[0].api.other("tml-three")
        ready = await is_ready(api)
        if ready:
            third = Tenant(api)
            await third.live()
            assert "error" not in str(third.answers)
        await clock.sleep(100)
        held = server._parts.worker.held()
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, left
    return Told([tenant.answers for tenant in tenants], ready, held, sabotage.calls)


async def check(calm: Told, sabotage: Sabotage) -> None:
    """One of the tenants may have got errors, everything else is as if nothing had happened."""
    with anyio.fail_after(60):
        seen = await told(sabotage)
    name = seen.calls[sabotage.at - 1]
    when = "after" if sabotage.after else "before"
    what = f"{sabotage.error.__name__} {when} call {sabotage.at}, {name}"
    assert seen.ready, what
    assert seen.held == calm.held, what
    pairs = list(zip(seen.answers, calm.answers, strict=True))
    harmed = [(mine, theirs) for mine, theirs in pairs if mine != theirs]
    assert len(harmed) <= 1, what
    for mine, theirs in harmed:
        # Without an operation that has failed, what follows is another model: the first
        # difference must be an error.
        first = next(key for key in mine if mine[key] != theirs[key])
        assert "error" in str(mine[first]), f"{what}: {first} is {mine[first]}"


async def test_two_tenants_live_as_told() -> None:
    calm = await told(Sabotage())
    assert calm.ready
    assert calm.held == dict.fromkeys(calm.held, 0)
    assert all("error" not in str(answers) for answers in calm.answers)
    # The calls that can fail: of the loop, restores, snapshots, publishing, samples, ends, upkeep.
    assert {
        "FakeEngine.train",
        "FakeEngine.optim_step",
        "FakeEngine.publish",
        "FakeEngine.sample",
        "FakeEngine.save_adapter",
        "FakeEngine.save_snapshot",
        "FakeEngine.delete_saved",
        "FakeEngine.drop_adapter",
        "MemoryStore.finish",
        "MemoryStore.change_model",
        "MemoryStore.put_sampler",
        "MemoryStore.trim_journal",
        "MemoryStore.close_samplers",
        "MemoryStore.sessions",
        "MemoryStore.drop_results_before",
        "MemoryStore.prune",
    } <= set(calm.calls)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_each_kind_of_call_may_fail_once(after: bool) -> None:
    calm = await told(Sabotage())
    first: dict[str, int] = {}
    for number, name in enumerate(calm.calls, 1):
        first.setdefault(name, number)
    for turn, number in enumerate(first.values()):
        await check(calm, Sabotage(number, ERRORS[turn % len(ERRORS)], after))


# The exhaustive tests take a share of the calls each, so that none takes more than a minute.
SHARES = 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_any_call_may_fail_with_any_error(
    error: type[BaseException], after: bool, share: int
) -> None:
    calm = await told(Sabotage())
    for number in range(1 + share, len(calm.calls) + 1, SHARES):
        await check(calm, Sabotage(number, error, after))


# -- a request fails while it is answered ---------------------------------------------------------


class Caller:
    """Sends the requests of a session; one of them is sent again when it was not answered."""

    def __init__(self, api: Api, sabotage: Sabotage) -> None:
        self.api = api
        self.sabotage = sabotage
        self.refused: list[Reply] = []

    async def send(self, path: str, body: Any) -> Any:
        headers = {"authorization": f"Bearer {self.api.key}", "x-api-key": self.api.key}
        data = msgspec.json.encode(body)
        request = HttpRequest("POST", path, Pool.REST, 3600, "", headers, data)
        for _ in range(2):
            self.sabotage.counting = True
            # Completions draw in tasks of their own, and nothing else runs meanwhile.
            self.sabotage.in_background = path.startswith("/v1/")
            reply = await self.api.transport.send(request)
            self.sabotage.counting = False
            if reply.status == 200:
                break
            self.refused.append(reply)
        assert reply.status == 200, (path, reply)
        if reply.headers["content-type"].startswith("application/json"):
            return msgspec.json.decode(reply.body)
        return reply.body

    async def ended(self, future: Any) -> Any:
        body = {"request_id": future["request_id"], "allow_metadata_only": False}
        while True:
            found = await self.send("/api/v1/retrieve_future", body)
            if found.get("type") != "try_again":
                assert "error" not in found, found
                return found

    async def live(self) -> str:
        """A session with a model, a sample, a save and completions; returns what was trained."""
        opened = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        session = (await self.send("/api/v1/create_session", opened))["session_id"]
        body: dict[str, Any] = {"session_id": session, "model_seq_id": 0}
        body |= {"base_model": "tinkex/tiny", "lora_config": {"rank": 8}}
        model = (await self.ended(await self.send("/api/v1/create_model", body)))["model_id"]
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        stepped = await self.ended(await self.send("/api/v1/optim_step", body))
        body = {"model_id": model, "seq_id": 2, "path": "kept"}
        await self.ended(await self.send("/api/v1/save_weights", body))
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinkex/tiny"}
        made = await self.send("/api/v1/create_sampling_session", body)
        body = _sample(made["sampling_session_id"])
        await self.ended(await self.send("/api/v1/asample", body))
        for stream in (False, True):
            body = {"model": "tinkex/tiny", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
            answer = await self.send("/v1/completions", {**body, "stream": stream})
            assert stream == isinstance(answer, bytes)
            assert not stream or b"[DONE]" in answer or b"error" in answer
        await self.send(f"/api/v1/sessions/{session}/finish", SUCCESS)
        return str(stepped)


async def answered(sabotage: Sabotage) -> tuple[str, list[Reply], dict[str, int]]:
    """What a session got, what was refused, and what the server holds afterwards."""
    clock = FakeClock()
    store, engine = SabotagedStore(clock), SabotagedEngine(clock)
    store.sabotage = engine.sabotage = sabotage
    server = FakeServer(clock=clock, engine=engine, store=store, settings=Settings(**SETTINGS))
    async with clock.running(), server:
        asyncio.current_task().set_name("client")  # type: ignore[union-attr]
        caller = Caller(Api(server, clock), sabotage)
        got = await caller.live()
        assert await is_ready(caller.api)
        other = caller.api.other()
        session = await other.session()
        assert await other.loss(await other.train(await other.model(session), 1)) > 0
        await other.post(f"/sessions/{session}/finish", SUCCESS)
        await clock.sleep(700)
        return got, caller.refused, server._parts.worker.held()


async def check_answers(calm: str, held: dict[str, int], sabotage: Sabotage, name: str) -> None:
    """The session got what it gets without a failure, after one request was sent again."""
    what = f"{sabotage.error.__name__} at call {sabotage.at}, {name}"
    with anyio.fail_after(60):
        got, refused, left = await answered(sabotage)
    assert got == calm, what
    assert left == held, what
    assert len(refused) <= 1, what
    for reply in refused:
        assert reply.status in (500, 503), what
        assert reply.headers["x-request-id"], what
        assert b"sabotage" not in reply.body, what


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_request_that_fails_inside_is_refused_and_works_when_sent_again(
    after: bool,
) -> None:
    counted = Sabotage(in_request=True)
    calm, refused, held = await answered(counted)
    assert not refused
    assert held == dict.fromkeys(held, 0)
    assert {"MemoryStore.submit", "FakeEngine.sample", "MemoryStore.add_sampler"} <= set(
        counted.calls
    )
    for number, name in enumerate(counted.calls, 1):
        error = ERRORS[number % len(ERRORS)]
        await check_answers(calm, held, Sabotage(number, error, after, in_request=True), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_any_call_of_a_request_may_fail_with_any_error(
    error: type[BaseException], after: bool
) -> None:
    counted = Sabotage(in_request=True)
    calm, _, held = await answered(counted)
    for number, name in enumerate(counted.calls, 1):
        await check_answers(calm, held, Sabotage(number, error, after, in_request=True), name)


# -- a new server begins with what another one left -----------------------------------------------


async def resumed(sabotage: Sabotage) -> tuple[list[str], bool, dict[str, int]]:
    """Two tenants' operations that one server accepted and the next one runs, with a failure."""
    clock = FakeClock()
    store = SabotagedStore(clock)
    store.sabotage = sabotage
    first = SabotagedEngine(clock, delays=Delays(train_s=1e6, optim_s=1e6))
    first.sabotage = sabotage
    settings = Settings(**SETTINGS, grace_s=0.0)
    before = FakeServer(clock=clock, engine=first, store=store, settings=settings)
    futures: list[Any] = []
    sessions: list[str] = []
    async with clock.running(), before:
        for name in ("one", "two"):
            api = Api(before, clock, f"tml-{name}")
            sessions.append(await api.session())
            model = await api.model(sessions[-1])
            futures += [await api.train(model, 1), await api.step(model, 2)]
            body = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
            futures.append(await api.post("/save_weights_for_sampler", body))
    second = SabotagedEngine(clock)
    second.sabotage = sabotage
    sabotage.counting = True
    after = FakeServer(clock=clock, engine=second, settings=settings, after=before)
    async with clock.running(), after:
        asyncio.current_task().set_name("client")  # type: ignore[union-attr]
        await clock.sleep(100)
        sabotage.counting = False
        one, two = Api(after, clock, "tml-one"), Api(after, clock, "tml-two")
        ready = await is_ready(one)
        answers = [str(await one.outcome(future)) for future in futures[:3]]
        answers += [str(await two.outcome(future)) for future in futures[3:]]
        for api, session in zip((one, two), sessions, strict=True):
            await api.post(f"/sessions/{session}/finish", SUCCESS)
        await clock.sleep(100)
        return answers, ready, after._parts.worker.held()


async def check_resumed(
    calm: list[str], held: dict[str, int], sabotage: Sabotage, name: str
) -> None:
    """One of the tenants may have got errors; everything else ended as without a failure."""
    what = f"{sabotage.error.__name__} at call {sabotage.at}, {name}"
    with anyio.fail_after(60):
        seen, ready, left = await resumed(sabotage)
    assert ready, what
    assert left == held, what
    harmed = {at // 3 for at in range(6) if seen[at] != calm[at]}
    assert len(harmed) <= 1, f"{what}: {seen}"
    for at in range(6):
        assert seen[at] == calm[at] or "error" in seen[at] or "error" in str(seen[:at]), what


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_a_new_server_resumes_what_is_pending_though_a_call_fails(late: bool) -> None:
    counted = Sabotage()
    calm, ready, held = await resumed(counted)
    assert ready
    assert "error" not in str(calm)
    assert held == dict.fromkeys(held, 0)
    assert {
        "MemoryStore.pending",
        "MemoryStore.journal",
        "FakeEngine.train",
        "FakeEngine.publish",
    } <= set(counted.calls)
    for number, name in enumerate(counted.calls, 1):
        error = ERRORS[number % len(ERRORS)]
        await check_resumed(calm, held, Sabotage(number, error, late), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_a_new_server_resumes_though_any_call_fails_with_any_error(
    error: type[BaseException], late: bool
) -> None:
    counted = Sabotage()
    calm, _, held = await resumed(counted)
    for number, name in enumerate(counted.calls, 1):
        await check_resumed(calm, held, Sabotage(number, error, late), name)


# -- what is not one tenant's ---------------------------------------------------------------------


async def test_a_scheduler_that_ends_is_not_ready_and_accepts_nothing() -> None:
    clock = FakeClock()
    server = FakeServer(clock=clock)
    failures: list[str] = []
    server._parts.readiness.on_failure = failures.append
    async with clock.running(), server:
        api = Api(server, clock)
        model = await api.model()
        sampler = await api.sampler(await api.session())
        assert await is_ready(api)

        def broken(_: object) -> None:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")

        server._parts.worker._loop._start = broken  # type: ignore[method-assign]
        waiting = await api.train(model, 1)
        await clock.sleep(1)
        assert failures == ["the scheduler has ended (OverflowError)"]
        ready = await page(api, "/readyz")
        assert ready.status == 503
        assert b"the scheduler has ended" in ready.body
        assert (await page(api, "/healthz")).status == 200
        step = {"model_id": model, "seq_id": 2, "adam_params": {}, "type": "optim_step"}
        for path, body in (("/optim_step", step), ("/asample", _sample(sampler))):
            refused = await api.call("POST", path, body)
            assert refused.status == 503
            assert refused.headers["retry-after"]
    # What was accepted before is done by the next server.
    after = FakeServer(clock=clock, after=server)
    async with clock.running(), after:
        assert await Api(after, clock).loss(waiting) > 0


async def test_a_queue_that_cannot_be_planned_holds_up_no_other(start: Any) -> None:
    async with start() as api:
        other = api.other()
        bad, good = await api.model(), await other.model()
        run = await api.server._parts.worker._run_of(bad)

        class Broken(Queue):
            @property
            def turn(self) -> int:
                raise KeyError("broken")

        run.queue = Broken(bad, next_seq=1, last_seq=0)
        await api.train(bad, 1)
        assert await other.loss(await other.train(good, 1)) > 0
        assert await is_ready(api)


async def test_an_operation_whose_outcome_is_never_stored_fails_alone(start: Any) -> None:
    """Its model is evicted and tried again; the others share no batch with it for long."""
    async with start(delays=Delays(train_s=1)) as api:
        other = api.other()
        bad, good = await api.model(), await other.model()
        store, inner = api.server.store, api.server.store.finish

        async def finish(op_id: str, outcome: Any, *args: Any) -> bool:
            if op_id == f"{bad}:1" and outcome.error is None:
                raise OverflowError("too large for the database")
            return await inner(op_id, outcome, *args)

        store.finish = finish
        first, second = await api.train(bad, 1), await other.train(good, 1)
        assert await other.loss(second) > 0
        assert "too large" in (await api.outcome(first))["error"]
        assert await api.loss(await api.train(bad, 2)) > 0
        assert api.server._parts.worker.held()["suspects"] == 0


async def test_a_sample_whose_outcome_is_never_stored_fails(start: Any) -> None:
    async with start() as api:
        sampler = await api.sampler(await api.session())
        store, inner = api.server.store, api.server.store.finish

        async def finish(op_id: str, outcome: Any, *args: Any) -> bool:
            if outcome.error is None:
                raise MemoryError("no memory for it")
            return await inner(op_id, outcome, *args)

        store.finish = finish
        assert "MemoryError" in (await api.outcome(await api.sample(sampler)))["error"]
        assert api.server._parts.worker.held()["samples"] == 0


async def test_a_request_that_was_stored_but_not_queued_runs_when_it_is_sent_again(
    start: Any,
) -> None:
    async with start() as api:
        model = await api.model()
        store, inner = api.server.store, api.server.store.submit

        async def submit(operation: Any) -> Any:
            await inner(operation)
            store.submit = inner
            raise RuntimeError("the connection was lost after the commit")

        store.submit = submit
        body = {"model_id": model, "seq_id": 1, "adam_params": {}, "type": "optim_step"}
        assert (await api.call("POST", "/optim_step", body)).status == 500
        assert (await api.result(await api.post("/optim_step", body)))["metrics"]["step"] == 1


async def test_one_session_that_cannot_be_ended_stops_no_upkeep(start: Any) -> None:
    async with start(session_timeout_s=60, upkeep_interval_s=10) as api:
        bad, good = await api.session(), await api.session()
        for session in (bad, good):
            await api.post("/session_heartbeat", {"session_id": session})
        worker = api.server._parts.worker
        inner = worker.end_session

        async def end_session(session: Any, status: Any) -> bool:
            if session.session_id == bad:
                raise OverflowError("broken")
            return await inner(session, status)

        worker.end_session = end_session  # type: ignore[method-assign]
        await api.clock.sleep(100)
        stored = {s.session_id for s in await api.server.store.sessions(active=True)}
        assert stored == {bad}
