"""Local places for samples on their way out, and the pause that all samplers of a key observe.

A place is held only until the server has accepted a sample, not until its result is there.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinkex.errors import BillingError
from tinkex.metrics import meter
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tinkex.clients.session import Session
    from tinkex.errors import TinkerError

_log = logging.getLogger(__name__)
_AT_ONCE = 400
_AT_ONCE_THROTTLED = 10
_THROTTLED_COST = 20
_LARGE_BYTES = 128 * 1024
_SAY_EVERY_S = 60.0


class Dispatcher:
    """The way out for all samples of one session."""

    def __init__(self, session: Session) -> None:
        # Mutable state: the two counters of samples being sent, and when a pause was last logged.
        self._session = session
        self._pause = session.pause
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._throttled_slots = asyncio.Semaphore(_AT_ONCE_THROTTLED)
        self._said = float("-inf")

    @asynccontextmanager
    async def room(self, estimate_bytes: int) -> AsyncGenerator[None]:
        """Hold a place for one sample; waits out every pause first."""
        await self._pause.wait()
        asked, budget = self._session.clock.now(), self._session.sampling_bytes
        if not self._pause.throttled:
            async with self._slots:
                self._got_slot(asked)
                async with budget.reserve(estimate_bytes):
                    yield
            return
        async with self._slots, self._throttled_slots:
            self._got_slot(asked)
            async with budget.reserve(estimate_bytes * _THROTTLED_COST):
                yield

    def _got_slot(self, asked: float) -> None:
        if meter.on:
            meter.wait("slot", self._session.clock.now() - asked)

    def request(self, seconds: float, error: TinkerError) -> None:
        """Pause every sampler that shares the limit, and log it at most once a minute."""
        reason = "billing" if isinstance(error, BillingError) else "rate_limit"
        self._pause.request(seconds, reason)
        if meter.on:
            meter.retry(routes.ASAMPLE.name, reason)
        now = self._session.clock.now()
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            _log.warning("sampling is paused: the server answers %s", error)


def pause_s(estimate_bytes: int) -> float:
    """How long a 429 without a hint pauses samples: longer if they are large."""
    return 1.0 if estimate_bytes <= _LARGE_BYTES else 5.0
