"""Thousands of models that do nothing cost nothing: counted in looks and calls, not in seconds."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.server.store.memory import MemoryStore
from tinkex.testing import FakeClock, FakeEngine, FakeServer

from .conftest import Api
from .mortal import save_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

MANY, FEW = 5000, 200
SUCCESS = {"reason": {"type": "success"}}


class CountedStore(MemoryStore):
    """Counts its calls."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in _CALLS:
            self.calls[name] += 1
        return super().__getattribute__(name)


_CALLS = frozenset(name for name in vars(MemoryStore) if not name.startswith("_"))


class CountedEngine(FakeEngine):
    """Notes how many adapters are dropped at once."""

    dropping = 0
    most_dropping = 0

    async def drop_adapter(self, model_id: str) -> None:
        self.dropping += 1
        self.most_dropping = max(self.most_dropping, self.dropping)
        await self._clock.sleep(0.01)
        await super().drop_adapter(model_id)
        self.dropping -= 1


class Crowd:
    """A server that was started with many stored models of one tenant and a few of another."""

    def __init__(self, api: Api, sessions: dict[str, str]) -> None:
        self.one, self.two = api, api.other()
        self.store: Any = api.server.store
        self.engine: Any = api.server.engine
        self.worker = api.server._parts.worker
        self.sessions = sessions

    def ids(self, name: str) -> list[str]:
        return [f"{self.sessions[name]}:train:{n}" for n in range(1, (MANY, FEW)[name == "two"])]

    @property
    def looks(self) -> int:
        return self.worker._loop.looks


@asynccontextmanager
async def crowded() -> AsyncIterator[Crowd]:
    clock = FakeClock()
    store, engine = CountedStore(clock), CountedEngine(clock)
    server = FakeServer(clock=clock, engine=engine, store=store, record=False)
    sessions: dict[str, str] = {}
    async with clock.running(), server:
        first = Api(server, clock)
        for name, api, count in (("one", first, MANY), ("two", first.other(), FEW)):
            session = sessions[name] = await api.session()
            model = await api.model(session)
            checkpoint = await store.get_checkpoint(await save_state(api, model, 1))
            stored = await store.get_model(model)
            assert stored is not None
            assert checkpoint is not None
            for number in range(1, count):
                # A model that was trained, saved in a snapshot and left alone.
                await store.put_model(
                    replace(
                        stored,
                        model_id=f"{session}:train:{number}",
                        snapshot_location=checkpoint.location,
                        snapshot_seq=0,
                    )
                )
    store.calls.clear()
    after = FakeServer(clock=clock, engine=engine, after=server, record=False)
    async with clock.running(), after:
        yield Crowd(Api(after, clock), sessions)


async def test_a_server_with_thousands_of_models_starts_with_a_few_queries() -> None:
    async with crowded() as crowd:
        await crowd.one.clock.sleep(1)
        assert sum(crowd.store.calls.values()) < 20, crowd.store.calls
        assert crowd.worker.held()["models"] == 0
        assert await crowd.two.loss(await crowd.two.train(crowd.ids("two")[0], 1)) > 0


async def test_idle_models_are_not_looked_at() -> None:
    async with crowded() as crowd:
        for model in (*crowd.ids("one"), *crowd.ids("two")):
            await crowd.worker._run_of(model)
        await crowd.one.clock.sleep(1)
        assert crowd.worker.held()["models"] == MANY + FEW - 2
        model, before = crowd.ids("two")[0], crowd.looks
        for seq in range(1, 21):
            await crowd.two.loss(await crowd.two.train(model, seq))
        assert crowd.looks - before < 20 * 10
        # A poll asks for the place in the queue, and counts what waits and not the models.
        assert list(crowd.worker._loop.queues) == []


async def test_ending_a_session_of_thousands_of_models_leaves_room_for_others() -> None:
    async with crowded() as crowd:
        two = crowd.two
        await two.loss(await two.train(crowd.ids("two")[0], 1))
        crowd.store.calls.clear()
        before, begun = crowd.looks, two.clock.now()
        await crowd.one.post(f"/sessions/{crowd.sessions['one']}/finish", SUCCESS)
        assert await two.loss(await two.train(crowd.ids("two")[0], 2)) > 0
        assert two.clock.now() - begun < 0.1  # not after all of them
        while crowd.worker.held()["models"] > 1:
            await two.clock.sleep(1)
        assert crowd.engine.most_dropping <= 16
        assert crowd.looks - before < 8 * MANY
        assert sum(crowd.store.calls.values()) < 20 * MANY
        assert [m.session_id for m in await crowd.store.open_models()] == [
            crowd.sessions["two"]
        ] * FEW
