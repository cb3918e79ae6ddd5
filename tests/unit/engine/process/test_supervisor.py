"""The engine that outlives its process: when it is started again, who waits, and who is told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.contracts.engine_suite import base, sample_op
from tinkex.engine.process.supervisor import RestartingEngine, first_line
from tinkex.errors import ClosedError, EngineDiedError, ModelError
from tinkex.testing import FakeClock, FakeEngine
from tinkex.testing.fake_engine import TINY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Child(FakeEngine):
    """A child that dies when it is told to."""

    def __init__(self, clock: FakeClock, pid: int, *, hangs: bool = False) -> None:
        super().__init__(clock, models=[TINY])
        self.pid = pid
        self.closed = False
        self._hangs = hangs
        self._death: asyncio.Future[EngineDiedError | None] = asyncio.Future()

    def die(self, how: str = "the engine process was killed by signal 9") -> None:
        self._death.set_result(EngineDiedError(f"{how}; its last lines:\n/srv/secret/path.py"))

    async def wait_dead(self) -> EngineDiedError | None:
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        self.closed = True
        if not self._death.done():
            self._death.set_result(None)

    async def sample(self, *args: Any, **options: Any) -> Any:
        if not self._hangs:
            return await super().sample(*args, **options)
        death = await self.wait_dead()
        raise death or ClosedError("the engine was closed")


class Nursery:
    """Starts children as its list says: a child, or an error."""

    def __init__(self, clock: FakeClock, *plan: Any) -> None:
        self.clock = clock
        self.plan = list(plan)
        self.children: list[Child] = []
        self.started_at: list[float] = []
        self._born = anyio.Event()

    async def start(self, on_phase: Callable[[str], None]) -> Child:
        self.started_at.append(self.clock.now())
        on_phase("loading tinkex/tiny")
        outcome = self.plan.pop(0) if self.plan else "child"
        if isinstance(outcome, Exception):
            raise outcome
        child = Child(self.clock, 100 + len(self.children), hangs=outcome == "hangs")
        self.children.append(child)
        self._born.set()
        self._born = anyio.Event()
        return child

    async def child(self, number: int) -> Child:
        while len(self.children) <= number:
            await self._born.wait()
        return self.children[number]


@asynccontextmanager
async def running(
    *plan: Any, on_change: Callable[[], None] | None = None
) -> AsyncGenerator[tuple[RestartingEngine, Nursery]]:
    clock = FakeClock()
    nursery = Nursery(clock, *plan)
    engine = RestartingEngine(nursery.start, clock, on_change)
    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(engine.run)
        yield engine, nursery
        await engine.close()
        group.cancel_scope.cancel()


async def test_a_call_made_before_the_first_child_is_ready_waits_for_it():
    async with running() as (engine, _):
        assert engine.state == "starting"
        assert engine.models == ()
        assert (await engine.sample(sample_op(base()))).generated_tokens
        assert (engine.state, engine.generation, engine.pid) == ("ready", 1, 100)
        assert [spec.name for spec in engine.models] == ["tinkex/tiny"]


async def test_a_child_that_dies_is_replaced_at_once_and_closed():
    async with running() as (engine, nursery):
        await engine.wait_ready()
        nursery.children[0].die()
        await anyio.wait_all_tasks_blocked()
        assert (await engine.sample(sample_op(base()))).generated_tokens
        assert (engine.generation, engine.pid) == (2, 101)
        assert nursery.started_at == [0.0, 0.0]
        assert nursery.children[0].closed


async def test_a_call_under_way_is_told_in_one_line_without_paths_how_the_child_died():
    async with running("hangs") as (engine, nursery):
        await engine.wait_ready()
        call = asyncio.ensure_future(engine.sample(sample_op(base())))
        await anyio.wait_all_tasks_blocked()
        nursery.children[0].die()
        with pytest.raises(EngineDiedError) as caught:
            await call
        assert str(caught.value) == "the engine process was killed by signal 9"
        assert caught.value.retryable


async def test_whoever_is_told_of_a_death_and_calls_again_at_once_gets_the_next_child():
    async with running("hangs") as (engine, nursery):
        await engine.wait_ready()

        async def twice() -> int:
            with pytest.raises(EngineDiedError):
                await engine.sample(sample_op(base()))
            return (await engine.sample(sample_op(base()))).generated_tokens

        calls = [asyncio.ensure_future(twice()) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        nursery.children[0].die()
        assert all(await asyncio.gather(*calls))


async def test_children_that_die_one_after_another_are_started_ever_later():
    async with running() as (engine, nursery):
        for number in range(9):
            (await nursery.child(number)).die()
        await nursery.child(9)
        await engine.wait_ready()
        waits = [b - a for a, b in zip(nursery.started_at, nursery.started_at[1:], strict=False)]
        assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


async def test_a_child_that_lived_long_is_replaced_at_once_again():
    async with running() as (engine, nursery):
        for number in range(3):
            await engine.wait_ready()
            assert len(nursery.children) == number + 1
            await nursery.clock.sleep(61.0)
            nursery.children[number].die()
            await anyio.wait_all_tasks_blocked()
        assert nursery.started_at == [0.0, 61.0, 122.0, 183.0]


async def test_a_first_start_that_fails_is_not_tried_again_and_everybody_is_told_why():
    refusal = ModelError("no/such-model: there is no such folder")
    async with running(refusal) as (engine, nursery):
        with pytest.raises(ModelError, match="no/such-model"):
            await engine.wait_ready()
        with pytest.raises(ModelError):
            await engine.sample(sample_op(base()))
        assert engine.state == "failed"
        assert engine.problem is refusal
        assert len(nursery.started_at) == 1


async def test_a_later_start_that_dies_is_tried_again_a_few_times_and_then_given_up():
    death = EngineDiedError("the engine process ended with exit code 1")
    async with running("child", *[death] * 9) as (engine, nursery):
        await engine.wait_ready()
        nursery.children[0].die()
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineDiedError, match=r"cannot be started: .* exit code 1"):
            await engine.sample(sample_op(base()))
        assert len(nursery.started_at) == 6
        assert engine.state == "failed"


async def test_a_later_start_that_is_refused_is_given_up_at_once():
    gone = ModelError("/models/mine: the folder is gone")
    async with running("child", gone) as (engine, nursery):
        await engine.wait_ready()
        nursery.children[0].die()
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineDiedError, match=r"cannot be started: \(a file\): the folder"):
            await engine.sample(sample_op(base()))
        assert len(nursery.started_at) == 2


async def test_closing_ends_the_child_and_whoever_waits():
    async with running("hangs") as (engine, nursery):
        await engine.wait_ready()
        call = asyncio.ensure_future(engine.sample(sample_op(base())))
        await anyio.wait_all_tasks_blocked()
        await engine.close()
        with pytest.raises(ClosedError):
            await call
        with pytest.raises(ClosedError):
            await engine.sample(sample_op(base()))
        assert nursery.children[0].closed
        assert len(nursery.children) == 1


async def test_gauges_wait_for_nobody():
    async with running() as (engine, _):
        assert await engine.stats() == {}
        await engine.wait_ready()
        assert "kv_blocks_total" in await engine.stats()


async def test_every_change_is_told_with_what_it_is_about():
    told: list[tuple[str, str]] = []
    engines: list[RestartingEngine] = []
    async with running(on_change=lambda: told.append((engines[0].state, engines[0].phase))) as (
        engine,
        nursery,
    ):
        engines.append(engine)
        await engine.wait_ready()
        nursery.children[0].die()
        await anyio.wait_all_tasks_blocked()
    assert told == [
        ("starting", "loading tinkex/tiny"),
        ("ready", "ready"),
        ("restarting", "starting the engine process again"),
        ("restarting", "loading tinkex/tiny"),
        ("ready", "ready"),
        ("closed", "closed"),
    ]


def test_what_tenants_read_names_models_but_no_places():
    error = ModelError("meta/llama at '/srv/models/x y': /srv/models/w.bin, line 3\nsecond line")
    assert first_line(error) == "meta/llama at '(a file) y': (a file), line 3"
