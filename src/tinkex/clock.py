"""Time as an argument, so that tests can control it.

Nothing outside this module sleeps or reads a clock. `SystemClock` is the real one;
`tinkex.testing.FakeClock` jumps forward when every task is waiting.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Clock(Protocol):
    """What anything that waits is given."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for timestamps only."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; zero or less yields once."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        import anyio

        await anyio.sleep(max(seconds, 0.0))


class FixedDate:
    """Another clock with a fixed date."""

    def __init__(self, clock: Clock, wall: float) -> None:
        self._clock = clock
        self._wall = wall

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


@asynccontextmanager
async def time_limit(clock: Clock, seconds: float | None) -> AsyncGenerator[TimeLimit]:
    """Cancel the body after `seconds` of `clock`; `.expired` says afterwards whether it did.

    Works on a fake clock, where anyio's own `move_on_after` would wait in real time.
    """
    import anyio

    limit = TimeLimit()
    if seconds is None:
        yield limit
        return

    async def watch() -> None:
        await clock.sleep(seconds)
        limit.expired = True
        group.cancel_scope.cancel()

    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            yield limit
        except Exception as error:  # noqa: BLE001 - raised below, as it is
            failure = error
        group.cancel_scope.cancel()
    # Outside the group, which would wrap it.
    if failure is not None:
        raise failure


class TimeLimit:
    """What `time_limit` yields."""

    def __init__(self) -> None:
        self.expired = False
