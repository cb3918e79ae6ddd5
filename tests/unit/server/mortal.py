"""A server that can be killed at any of its steps: at a call of the engine or of the store.

A kill is a place in the count of all such calls. `World` lives through lives of servers and
engines; what survives is the store, and what the engine has saved.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio

from tinkex.engine.process.calls import METHODS
from tinkex.errors import EngineDiedError, StorageError
from tinkex.server import Settings
from tinkex.server.store.memory import MemoryStore
from tinkex.testing import FakeClock, FakeEngine, FakeServer

from .conftest import Api, datum

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

When = Literal["before", "after"]

ENGINE_CALLS = METHODS - {"copy_saved", "export_saved", "import_saved", "stats"}
STORE_CALLS = (
    "submit",
    "start",
    "finish",
    "change_model",
    "trim_journal",
    "add_sampler",
    "put_sampler",
    "put_checkpoint",
    "end_session",
    "remember",
)


@dataclass
class Fate:
    """What happens at which call; calls are counted through all lives."""

    engine_dies: dict[int, When] = field(default_factory=dict)
    server_dies: dict[int, When] = field(default_factory=dict)
    storage_fails: set[int] = field(default_factory=set)
    calls: int = 0
    crashed: anyio.Event = field(default_factory=anyio.Event)
    buried: anyio.Event = field(default_factory=anyio.Event)

    async def meet(self, act: Callable[[], Awaitable[Any]], on_death: Callable[[], None]) -> Any:
        """One call: perhaps the last of somebody."""
        if self.buried.is_set():
            raise asyncio.CancelledError
        self.calls += 1
        number = self.calls
        await anyio.lowlevel.checkpoint()
        if self.engine_dies.get(number) == "before":
            on_death()
        await self._crash(self.server_dies.get(number) == "before")
        result = await act()
        if self.engine_dies.get(number) == "after":
            on_death()
        await self._crash(self.server_dies.get(number) == "after")
        await anyio.lowlevel.checkpoint()
        return result

    async def _crash(self, now: bool) -> None:
        """Nothing after this happens any more in this life."""
        if now:
            self.crashed.set()
            await self.buried.wait()
            raise asyncio.CancelledError


class MortalEngine(FakeEngine):
    """Dies when it is its fate, and is there again at once, with nothing in its memory."""

    def __init__(self, clock: FakeClock, fate: Fate, disk: dict[str, Any], **options: Any) -> None:
        super().__init__(clock, **options)
        self._saved = disk
        self.fate = fate
        self.lives = 1

    @property
    def generation(self) -> int:
        """Which of its processes this is, as the host's engine says it."""
        return self.lives

    def die(self) -> None:
        self._adapters.clear()
        self._snapshots.clear()
        self.lives += 1

    async def _enter(self, name: str, ids: tuple[str, ...], delay_s: float) -> None:
        life = self.lives
        await super()._enter(name, ids, delay_s)
        self._check(life)

    def _check(self, life: int) -> None:
        if life != self.lives:
            raise EngineDiedError("the engine was killed")


def _mortal(name: str) -> Any:
    async def call(self: MortalEngine, *args: Any, **options: Any) -> Any:
        life = self.lives

        async def act() -> Any:
            self._check(life)
            return await getattr(FakeEngine, name)(self, *args, **options)

        result = await self.fate.meet(act, self.die)
        self._check(life)
        return result

    return call


for _name in ENGINE_CALLS:
    setattr(MortalEngine, _name, _mortal(_name))


class MortalStore(MemoryStore):
    """The server may die around any of its writes, and any of them may fail."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.fate = fate
        self.broken = False


def _fatal(name: str) -> Any:
    async def call(self: MortalStore, *args: Any, **options: Any) -> Any:
        async def act() -> Any:
            if self.broken or self.fate.calls in self.fate.storage_fails:
                raise StorageError("the disk is full: free some space", "/data")
            return await getattr(MemoryStore, name)(self, *args, **options)

        return await self.fate.meet(act, lambda: None)

    return call


for _name in STORE_CALLS:
    setattr(MortalStore, _name, _fatal(_name))


class World:
    """What outlives servers: the clock, the store, the disk, and fate."""

    def __init__(self, fate: Fate | None = None, **settings: Any) -> None:
        self.fate = fate or Fate()
        self.clock = FakeClock()
        self.settings = Settings(**{"session_timeout_s": 1e9, **settings})
        self.disk: dict[str, Any] = {}
        self.engine: MortalEngine
        self.store = MortalStore(self.fate)
        self._server: FakeServer | None = None

    @asynccontextmanager
    async def server(self, **engine: Any) -> AsyncIterator[Api]:
        """One life of a server; leaving it is its death."""
        self.engine = MortalEngine(self.clock, self.fate, self.disk, **engine)
        if self._server is None:
            server = FakeServer(
                clock=self.clock,
                engine=self.engine,
                settings=self.settings,
                store=self.store,
            )
        else:
            # Cursors and times of another start are others.
            await self.clock.advance(1)
            server = FakeServer(
                clock=self.clock, engine=self.engine, settings=self.settings, after=self._server
            )
        self._server = server
        async with self.clock.running(), server:
            yield Api(server, self.clock)

    async def live(self, story: Callable[[Api], Awaitable[None]]) -> None:
        """Tell a story to one server after another until it comes to its end."""
        ended = False
        while not ended:
            self.fate.crashed, self.fate.buried = anyio.Event(), anyio.Event()
            async with self.server() as api, anyio.create_task_group() as group:

                async def tell(api: Api = api) -> None:
                    nonlocal ended
                    await story(api)
                    ended = True
                    self.fate.crashed.set()

                group.start_soon(tell)
                await self.fate.crashed.wait()
                self.fate.buried.set()
                group.cancel_scope.cancel()
        self.fate.buried = anyio.Event()


async def save_state(api: Api, model: str, seq: int, name: str = "final") -> str:
    body = {"model_id": model, "seq_id": seq, "path": name, "overwrite": False}
    return (await api.result(await api.post("/save_weights", body)))["path"]


async def publish(api: Api, model: str, seq: int, number: int) -> str:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
    answer = await api.result(await api.post("/save_weights_for_sampler", body))
    return answer["sampling_session_id"]


async def logprobs(api: Api, sampler: str, seq: int) -> list[float | None]:
    return (await api.sampled(await api.sample(sampler, seq, prompt_logprobs=True))).prompt_logprobs


async def train(api: Api, model: str, first: int, steps: int) -> list[Any]:
    """Some steps of two passes each; every answer, as it came."""
    futures = []
    for number in range(steps):
        seq = first + 3 * number
        futures += [
            await api.train(model, seq, datum([seq, 2, 3])),
            await api.train(model, seq + 1, datum([4, seq])),
            await api.step(model, seq + 2),
        ]
    return [(await api.poll(future)).body for future in futures]
