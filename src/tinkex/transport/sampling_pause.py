"""The pause that all samplers of one server and one key observe together.

A 429 on a sample means "slow down" for everybody who shares the limit, in every thread. Pauses of
different servers or keys have nothing to do with each other.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING

from tinkex.clock import SystemClock
from tinkex.metrics import meter
from tinkex.urls import limiter_key

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.metrics import WaitReason

# For this long after a pause has ended, samples go out a few at a time.
THROTTLED_S = 10.0
# Waiting is cut into steps, because a pause can be extended while somebody waits for its end.
_STEP_S = 1.0


class Pause:
    """One shared pause; every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        # Mutable state: when the pause ends and why there is one, guarded by the lock.
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._reason: WaitReason = "rate_limit"

    def request(self, seconds: float, reason: WaitReason = "rate_limit") -> None:
        """Pause for `seconds` from now; a longer pause under way stays as it is."""
        with self._lock:
            until = self._clock.now() + seconds
            if until > self._until:
                self._until, self._reason = until, reason

    @property
    def remaining_s(self) -> float:
        """Seconds until samples may go out again; 0 when there is no pause."""
        with self._lock:
            return max(self._until - self._clock.now(), 0.0)

    @property
    def throttled(self) -> bool:
        """Whether there is a pause, or was one within the last ten seconds."""
        with self._lock:
            return self._clock.now() < self._until + THROTTLED_S

    async def wait(self) -> None:
        """Return when the pause is over."""
        if self.remaining_s <= 0:
            return
        began, reason = self._clock.now(), self._reason
        while (left_s := self.remaining_s) > 0:
            await self._clock.sleep(min(left_s, _STEP_S))
        if meter.on:
            meter.wait(reason, self._clock.now() - began)


class Pauses:
    """Finds the pause of a (base URL, key); one that nobody holds is forgotten."""

    def __init__(self, clock: Clock) -> None:
        # Mutable state: the pauses in use, guarded by the lock.
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses: weakref.WeakValueDictionary[tuple[str, str], Pause] = (
            weakref.WeakValueDictionary()
        )

    def get(self, base_url: str, api_key: str | None) -> Pause:
        """The pause shared by everybody with this server and key."""
        key = limiter_key(base_url, api_key)
        with self._lock:
            pause = self._pauses.get(key)
            if pause is None:
                pause = self._pauses[key] = Pause(self._clock)
            return pause


@cache
def process_pauses() -> Pauses:
    """The pauses of this process: a server counts requests per key, not per client object."""
    return Pauses(SystemClock())
