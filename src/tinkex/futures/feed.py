"""One long-poll for all pending samples of a sampler (`retrieve_futures`).

The feed only says what has finished; the payload is fetched by the request's `Lifecycle`. It does
not say what was lost or how the queue stands, so the request that has waited longest polls by
itself now and then. When the feed fails for good, all of them do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tinkex.errors import TinkerError
from tinkex.transport.retry import RetryLimits, RetryProgress, decide, outcome_of, random_share
from tinkex.types import (
    FutureFinished,
    FuturesRetrieveRequest,
    SamplingSessionFuturesTarget,
)
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from tinkex.clock import Clock
    from tinkex.transport.api import Api

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
# A poll without news that comes back sooner than this was not held by the server.
_HELD_S = 0.05
# Longer than a long-poll: ordinary samples never need it.
_SCOUT_AFTER_S = 45.0
# By then a server has reported the end of a cancelled request, or never will, and the caller of a
# completion has asked for it. No caller asks for a request whose acceptance was lost on the way.
_FORGET_S = 600.0


class CompletionFeed:
    """Which requests of one (sampling session, clone) have finished."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        sampling_session_id: str,
        cloned_sampler_id: int,
        *,
        silence_s: float,
    ) -> None:
        # Mutable state: waiters by request and since when, oldest first; the one that polls by
        # itself; completions that came before their waiter; cancelled requests and since when;
        # results to acknowledge; the server's cursor and last answer; whether the loop runs or has
        # given up.
        self._api = api
        self._clock = clock
        self._spawn = spawn
        self._silence_s = silence_s
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=cloned_sampler_id
        )
        self._waiters: dict[str, tuple[float, asyncio.Future[int | None]]] = {}
        self._scout: str | None = None
        self._unclaimed: dict[str, tuple[float, int | None]] = {}
        self._abandoned: dict[str, float] = {}
        self._retrieved: set[str] = set()
        self._cursor = 0
        self.last_life = clock.now()
        self._running = False
        self._gave_up = False

    async def finished(self, request_id: str) -> int | None:
        """Return when the request has ended, with its payload size where the server said it.

        Also returns, with None, when the caller is to poll by itself: it has waited long, others
        turned out to be lost, or the feed has given up.
        """
        if self._gave_up:
            return None
        if request_id in self._unclaimed:
            return self._unclaimed.pop(request_id)[1]
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = (self._clock.now(), waiter)
        self._wake()
        try:
            return await waiter
        finally:
            self._waiters.pop(request_id, None)

    def retrieved(self, request_id: str) -> None:
        """The result, or its error, has been fetched: the server may drop it."""
        self._unclaimed.pop(request_id, None)
        if self._scout == request_id:
            self._scout = None
        if not self._gave_up:
            self._retrieved.add(request_id)
            self._wake()

    def abandoned(self, request_id: str) -> None:
        """The caller is gone: the end of the request is acknowledged when it is reported."""
        if self._scout == request_id:
            self._scout = None
        if self._gave_up:
            return
        if request_id in self._unclaimed:
            self.retrieved(request_id)
        else:
            self._abandoned[request_id] = self._clock.now()
            self._wake()

    def lost(self) -> None:
        """The server has lost a request, so it may have lost the others: each polls now."""
        self._release(list(self._waiters))

    def _wake(self) -> None:
        if not self._running:
            self._running = True
            self._spawn(self._run())

    async def _run(self) -> None:
        self.last_life, failures = self._clock.now(), 0
        try:
            while self._waiters or self._retrieved or self._abandoned:
                try:
                    await self._poll()
                    self.last_life, failures = self._clock.now(), 0
                    if self._waiters and self._scout is None:
                        self._send_scout()
                    if self._abandoned or self._unclaimed:
                        self._forget()
                except TinkerError as error:
                    silent_s = self._clock.now() - self.last_life
                    decision = decide(
                        outcome_of(error),
                        "poll",
                        RetryProgress(failures, silent_s),
                        RetryLimits(self._silence_s),
                        jitter=random_share(),
                        wall=self._clock.wall(),
                    )
                    # Also in a 402 pause: each waiter then waits for credit in polls of its own.
                    if decision.wait_s is None or silent_s >= self._silence_s:
                        self._give_up(error)
                        return
                    failures += 1
                    # Unlike the poll for one result, the feed never asks again at once.
                    await self._clock.sleep(max(decision.wait_s, _PAUSE_S))
        finally:
            self._running = False

    async def _poll(self) -> None:
        acknowledged = sorted(self._retrieved)
        asked = self._clock.now()
        answer = await self._api.call(
            routes.RETRIEVE_FUTURES,
            FuturesRetrieveRequest(
                target=self._target, prev_cursor=self._cursor, retrieved_request_ids=acknowledged
            ),
        )
        self._retrieved.difference_update(acknowledged)
        self._cursor = answer.cursor
        for completion in answer.completions:
            size = (
                completion.response_payload_uncompressed_size
                if isinstance(completion, FutureFinished)
                else None
            )
            self._completed(completion.request_id, size)
        if not answer.completions and self._clock.now() - asked < _HELD_S:
            # Without a pause this would be a hot loop.
            await self._clock.sleep(_PAUSE_S)

    def _completed(self, request_id: str, size: int | None) -> None:
        _, waiter = self._waiters.pop(request_id, (0.0, None))
        if waiter is not None:
            if not waiter.done():
                waiter.set_result(size)
        elif self._abandoned.pop(request_id, None) is not None:
            self._retrieved.add(request_id)
        elif request_id != self._scout:
            self._unclaimed[request_id] = (self._clock.now(), size)

    def _send_scout(self) -> None:
        """Let the request that has waited longest poll by itself, if it has waited long."""
        oldest, (since, _) = next(iter(self._waiters.items()))
        if self._clock.now() - since >= _SCOUT_AFTER_S:
            self._scout = oldest
            self._release([oldest])

    def _forget(self) -> None:
        """Drop what the server will not report and no caller will ask for any more."""
        old = self._clock.now() - _FORGET_S
        for request_id in [one for one, since in self._abandoned.items() if since <= old]:
            del self._abandoned[request_id]
        for request_id in [one for one, (since, _) in self._unclaimed.items() if since <= old]:
            self.retrieved(request_id)

    def _release(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            _, waiter = self._waiters.pop(request_id)
            if not waiter.done():
                waiter.set_result(None)

    def _give_up(self, error: TinkerError) -> None:
        _log.warning(
            "session-level polling failed (%s); samples are polled for one by one from now on",
            error,
        )
        self._gave_up = True
        self._release(list(self._waiters))
        self._unclaimed.clear()
        self._abandoned.clear()
        self._retrieved.clear()
