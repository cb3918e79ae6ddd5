"""The engine as the scheduler calls it: which engine answers, and what runs in it.

An engine that died has lost everything it held, so every call is guarded: its result counts only if
it came from the engine that is still alive. Every call names its operations while it runs. A death
is counted against all operations that were running. An operation one death short of the limit runs
alone from then on: then one more death has one cause.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from tinkex.errors import ClosedError, EngineDiedError, RequestFailedError, TinkerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from tinkex.engine.protocol import Engine

T = TypeVar("T")

Epoch = tuple[int, int]


class EngineRestartedError(Exception):
    """The engine was replaced meanwhile, or there is none; what runs now is not the cause."""


class EngineAccess:
    """Guards calls by epoch, and lets suspects run one at a time."""

    def __init__(self, engine: Engine, most_deaths: int) -> None:
        self.engine = engine
        self._most = most_deaths
        # Mutable state: how many engines are known to have died; deaths by name, how many calls
        # run, whether one runs alone, how many wait, how many of those to run alone, and an event
        # for every change of these.
        self._died = 0
        self._deaths: dict[str, int] = {}
        self._running = 0
        self._alone = False
        self._waiting = 0
        self._waiting_alone = 0
        self._changed = anyio.Event()

    def epoch(self) -> Epoch:
        """Which engine is alive: deaths seen here, and restarts counted by the engine."""
        # A supervised engine counts its restarts; another one stays dead, which is counted here.
        return (self._died, int(getattr(self.engine, "generation", 0)))

    async def ready(self) -> Epoch:
        """Wait for an engine that is being started, and name it."""
        wait_ready: Callable[[], Awaitable[Any]] | None = getattr(self.engine, "wait_ready", None)
        if wait_ready is not None:
            try:
                await wait_ready()
            except TinkerError as error:
                raise EngineRestartedError(str(error)) from error
        return self.epoch()

    @property
    def hopeless(self) -> bool:
        """Whether the engine will not be started again."""
        return getattr(self.engine, "state", None) in ("failed", "closed")

    async def guard(self, epoch: Epoch, call: Awaitable[T]) -> T:
        """An engine call's answer; raises when it came from another engine or from none."""
        try:
            answer = await call
        except EngineDiedError:
            if epoch == self.epoch():
                self._died += 1
            raise
        except ClosedError as error:
            raise EngineRestartedError(str(error)) from error
        except RequestFailedError as error:
            if epoch != self.epoch():
                raise EngineRestartedError("the engine was started again") from error
            raise
        if epoch != self.epoch():
            raise EngineRestartedError("the engine was started again")
        return answer

    def __contains__(self, name: object) -> bool:
        """Whether something is a suspect, which runs alone."""
        return bool(self._deaths) and self._deaths.get(str(name), 0) >= max(self._most - 1, 1)

    @property
    def suspected(self) -> int:
        """How many names were running when the engine died and have not ended since."""
        return len(self._deaths)

    def blame(self, name: str) -> bool:
        """Count a death; True when something has seen too many."""
        self._deaths[name] = self._deaths.get(name, 0) + 1
        return self._deaths[name] >= self._most

    def clear(self, names: Iterable[str]) -> None:
        """Forget the deaths of what has ended."""
        if self._deaths:
            for name in names:
                self._deaths.pop(name, None)

    @asynccontextmanager
    async def running(self, names: Sequence[str]) -> AsyncGenerator[None]:
        """Run something in the engine: alone if it is a suspect, else beside other operations."""
        alone = bool(self._deaths) and any(name in self for name in names)
        await self._enter(alone=alone)
        try:
            yield
        finally:
            self._running -= 1
            self._alone = self._alone and not alone
            self._notify()

    async def _enter(self, *, alone: bool) -> None:
        self._waiting_alone += alone
        self._waiting += 1
        try:
            while self._alone or (self._running if alone else self._waiting_alone):
                await self._changed.wait()
            self._running += 1
            self._alone = alone
        finally:
            self._waiting -= 1
            self._waiting_alone -= alone
            self._notify()

    def _notify(self) -> None:
        if self._waiting:
            changed, self._changed = self._changed, anyio.Event()
            changed.set()
