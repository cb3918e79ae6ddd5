"""Sends samples to the server without flooding it.

A slot is held only until the server has accepted a sample, not until its result is there. A 429
pauses every sampler of the same server and key, and the same request is sent again: this is the
only place where sampling meets a 429.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tinkex.errors import BillingError, RateLimitError
from tinkex.transport.retry import BILLING_STEP_S, retry_after_s
from tinkex.wire import routes

if TYPE_CHECKING:
    from tinkex.clients.session import Session
    from tinkex.errors import APIStatusError
    from tinkex.types import UntypedAPIFuture

_log = logging.getLogger(__name__)
_AT_ONCE = 400
_AT_ONCE_THROTTLED = 10
_THROTTLED_COST = 20
_LARGE_BYTES = 128 * 1024
_SAY_EVERY_S = 60.0
_HEADERS = {"X-Tinker-Sampling-Backpressure": "1"}


class Dispatcher:
    """The way out for all samples of one session."""

    def __init__(self, session: Session) -> None:
        # Mutable state: the two counters of samples being sent, since when the account has been
        # refused, and when the user last heard of a pause.
        self._session = session
        self._pause = session.pause
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._throttled_slots = asyncio.Semaphore(_AT_ONCE_THROTTLED)
        self._refused_since: float | None = None
        self._said = float("-inf")

    async def submit(self, body: bytes, estimate_bytes: int, give_up_at: float) -> UntypedAPIFuture:
        """Send one sample, waiting out every pause until the clock says `give_up_at`."""
        while True:
            await self._pause.wait()
            try:
                accepted = await self._send(body, estimate_bytes)
            except RateLimitError as error:
                default_s = 1.0 if estimate_bytes <= _LARGE_BYTES else 5.0
                hint_s = retry_after_s(error.response.headers, self._session.clock.wall())
                self._pause_for(error, default_s if hint_s is None else hint_s, give_up_at)
            except BillingError as error:
                self._pause_for(error, BILLING_STEP_S, min(give_up_at, self._billing_end()))
            else:
                self._refused_since = None
                return accepted

    def _pause_for(self, error: APIStatusError, seconds: float, give_up_at: float) -> None:
        """Pause every sampler that shares the limit, and say so once in a while."""
        now = self._session.clock.now()
        if now + seconds > give_up_at:
            raise error
        self._pause.request(seconds)
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            _log.warning("sampling is paused: the server answers %s", error)

    def _billing_end(self) -> float:
        """When an account that cannot pay has been waited for long enough."""
        if self._refused_since is None:
            self._refused_since = self._session.clock.now()
        flags = self._session.api.client_config
        return self._refused_since + flags.billing_exception_max_pause_duration_sec

    async def _send(self, body: bytes, estimate_bytes: int) -> UntypedAPIFuture:
        session = self._session
        if not self._pause.throttled:
            async with self._slots, session.sampling_bytes.reserve(estimate_bytes):
                return await session.api.call(routes.ASAMPLE, body=body, headers=_HEADERS)
        cost = estimate_bytes * _THROTTLED_COST
        async with self._slots, self._throttled_slots, session.sampling_bytes.reserve(cost):
            return await session.api.call(routes.ASAMPLE, body=body, headers=_HEADERS)
