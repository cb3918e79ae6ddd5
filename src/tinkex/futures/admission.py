"""What a request waits for in this process before it is sent: bytes, a slot, a shared pause.

Byte budgets bound the memory of bodies under way. Samples also need one of a few hundred slots,
held only until the server has accepted the sample, and wait out the pause that all samplers of one
server and one key observe together: a 429 on a sample means "slow down" for every client that
shares the limit, in every thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

from tinkex.clock import SystemClock
from tinkex.errors import BillingError
from tinkex.metrics import meter
from tinkex.types import DmelChunk, EncodedTextChunk, ImageChunk
from tinkex.urls import limiter_key
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tinkex.clock import Clock
    from tinkex.errors import TinkerError
    from tinkex.metrics import WaitReason
    from tinkex.types import ModelInput

_log = logging.getLogger(__name__)
# Samples that are sent at the same time; in the seconds after a pause, a few, and each counts as
# many bytes as it has.
_SLOTS = 400
_SLOTS_THROTTLED = 10
_COST_THROTTLED = 20
_THROTTLED_S = 10.0
_NEVER = float("-inf")
# Waiting is cut into steps, because another client may extend the pause meanwhile.
_STEP_S = 1.0
_LOG_EVERY_S = 60.0


class ByteBudget:
    """Bytes that may be under way at once; used from one loop only.

    Waiters are admitted in order as soon as nothing is overdrawn. An admitted item may overdraw
    the budget, so a payload larger than the whole budget is delayed, never stuck.
    """

    def __init__(self, size_bytes: int) -> None:
        # Mutable state: what is left (negative while overdrawn) and the waiters, oldest first.
        self.left = size_bytes
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def reserve(self, size_bytes: int) -> AsyncGenerator[None]:
        """Hold `size_bytes` of the budget for the body."""
        await self.take(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)

    async def take(self, size_bytes: int) -> None:
        """Wait for room, then hold `size_bytes`; every take needs one `give_back`."""
        if self._waiters or self.left < 0:
            loop = asyncio.get_running_loop()
            waiter, asked = loop.create_future(), loop.time()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._admit()  # admitted and cancelled at once: admit the next one instead
                raise
            if meter.on:
                meter.wait("bytes", loop.time() - asked)
        self.left -= size_bytes
        if self._waiters:
            self._admit()

    def give_back(self, size_bytes: int) -> None:
        """Return what `take` held."""
        self.left += size_bytes
        if self._waiters:
            self._admit()

    def _admit(self) -> None:
        # One at a time: the admitted waiter subtracts first and then calls this again.
        while self._waiters and self.left >= 0:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class Pause:
    """A pause that several clients observe; every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        # Mutable state: when the pause ends and why there is one. Written under the lock; `until`
        # is read without it, because reading one number is atomic.
        self._clock = clock
        self._lock = threading.Lock()
        self.until = _NEVER
        self._reason: WaitReason = "rate_limit"

    def request(self, seconds: float, reason: WaitReason = "rate_limit") -> None:
        """Pause for `seconds` from now; a longer pause under way stays as it is."""
        with self._lock:
            until = self._clock.now() + seconds
            if until > self.until:
                self.until, self._reason = until, reason

    @property
    def remaining_s(self) -> float:
        """Seconds until samples may be sent again; 0 when there is no pause."""
        return max(self.until - self._clock.now(), 0.0)

    @property
    def throttled(self) -> bool:
        """Whether there is a pause, or was one within the last ten seconds."""
        return self._clock.now() < self.until + _THROTTLED_S

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
    """Finds the pause of a (base URL, key); one that no client holds is forgotten."""

    def __init__(self, clock: Clock) -> None:
        # Mutable state: the pauses in use, guarded by the lock.
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses: weakref.WeakValueDictionary[tuple[str, str], Pause] = (
            weakref.WeakValueDictionary()
        )

    def get(self, base_url: str, api_key: str | None) -> Pause:
        """The pause shared by all clients with this server and key."""
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


class SampleAdmission:
    """Admits the samples of one session, within its slots and its byte budget."""

    def __init__(self, clock: Clock, pause: Pause, budget: ByteBudget) -> None:
        # Mutable state: the two counters of samples being sent, and when a pause was last logged.
        self._clock = clock
        self._pause = pause
        self._budget = budget
        self._slots = asyncio.Semaphore(_SLOTS)
        self._slots_throttled = asyncio.Semaphore(_SLOTS_THROTTLED)
        self._logged = float("-inf")

    @asynccontextmanager
    async def room(self, estimate_bytes: int) -> AsyncGenerator[None]:
        """Hold a slot and `estimate_bytes` for one sample; waits out every pause first."""
        throttled = False
        if self._pause.until != _NEVER:
            await self._pause.wait()
            throttled = self._pause.throttled
        asked = self._clock.now()
        async with self._slots:
            if throttled:
                await self._slots_throttled.acquire()
                estimate_bytes *= _COST_THROTTLED
            try:
                if meter.on:
                    meter.wait("slot", self._clock.now() - asked)
                await self._budget.take(estimate_bytes)
                try:
                    yield
                finally:
                    self._budget.give_back(estimate_bytes)
            finally:
                if throttled:
                    self._slots_throttled.release()

    def pause(self, seconds: float, error: TinkerError) -> None:
        """Pause every sampler that shares the limit, and log it at most once a minute."""
        reason = "billing" if isinstance(error, BillingError) else "rate_limit"
        self._pause.request(seconds, reason)
        if meter.on:
            meter.retry(routes.ASAMPLE.name, reason)
        now = self._clock.now()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            _log.warning("sampling is paused: the server answers %s", error)


def input_bytes(model_input: ModelInput, *, per_token: int) -> int:
    """The protocol's estimate of an input's size, at so many bytes for each text token."""
    total = 0
    for part in model_input.chunks:
        if isinstance(part, EncodedTextChunk):
            total += per_token * len(part.tokens)
        elif isinstance(part, ImageChunk):
            total += len(part.data)
        elif isinstance(part, DmelChunk):
            total += len(part.dmel)
        else:
            total += len(part.location)
    return total


def text_tokens(model_input: ModelInput) -> int:
    """How many tokens of text there are; images and sound are counted by the server."""
    total = 0
    for part in model_input.chunks:
        if isinstance(part, EncodedTextChunk):
            total += len(part.tokens)
    return total
