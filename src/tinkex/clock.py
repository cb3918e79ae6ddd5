"""Time as an argument, so that tests can control it.

Nothing outside this module sleeps or reads a clock. `SystemClock` is the real one;
`tinkex.testing.FakeClock` jumps forward when every task is waiting.
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

# A date that differs by more than this from what has elapsed was set, and not adjusted.
_STEP_S = 60.0
_FOLLOWED_AFTER_S = 3600.0
_SINCE_BOOT: int = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", 0))

_log = logging.getLogger(__name__)


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

    def since_boot(self) -> float:
        """Seconds on a monotonic scale that counts the time in which the machine slept."""
        return time.clock_gettime(_SINCE_BOOT)

    async def sleep(self, seconds: float) -> None:
        import anyio

        await anyio.sleep(max(seconds, 0.0))


class SteadyDate:
    """Another clock whose date does not jump: a date that was set is followed after an hour.

    Until then it may be a mistake that is set right again, and meanwhile everything with a date
    would expire at once: tokens, links, results, checkpoints.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Counts the time in which the machine slept, if the clock can: its date is right after it.
        self._elapsed: Callable[[], float] = getattr(clock, "since_boot", clock.now)
        # Mutable state: the date at zero of what has elapsed, and when the date was set.
        self._zero = clock.wall() - self._elapsed()
        self._set_at: float | None = None

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        elapsed = self._elapsed()
        zero = self._clock.wall() - elapsed
        step_s = zero - self._zero
        if -_STEP_S < step_s < _STEP_S:
            self._zero, self._set_at = zero, None
        elif self._set_at is None:
            self._set_at = elapsed
            _log.warning(
                "the date of this machine was set by %+.0f s; it is followed in an hour, unless it "
                "is set right before",
                step_s,
            )
        elif elapsed - self._set_at >= _FOLLOWED_AFTER_S:
            _log.warning("the date that was set by %+.0f s is followed from now on", step_s)
            self._zero, self._set_at = zero, None
        return elapsed + self._zero

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


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
