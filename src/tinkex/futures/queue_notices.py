"""Reports when the server's queue pauses, and when it moves again.

One client has one state: that of most of its pending requests. Changes are reported at most once a
minute, so that a few requests which wait for something else do not make it flap. The user's
callback runs on a thread of its own: it may block without delaying any request.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.clock import Clock
    from tinkex.futures.future import Promise
    from tinkex.telemetry.events import Telemetry
    from tinkex.wire.results import PendingResult

_log = logging.getLogger(__name__)
_EVERY_S = 60.0
_DEFAULT_REASONS = {
    "paused_rate_limit": "the rate limit is reached; fewer requests in flight will help",
    "paused_capacity": "the server is at capacity; the request waits its turn",
}


class QueueNotices:
    """What the pending requests of one client last heard about the queue."""

    def __init__(
        self,
        subject: str,
        clock: Clock,
        on_change: Callable[[str, str | None], None] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        # Mutable state: the state that each pending request last heard, and how many are in each;
        # the state that was last reported, and when.
        self._subject = subject
        self._clock = clock
        self._on_change = None if on_change is None else Callback(on_change)
        self._telemetry = telemetry
        self._heard: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._state = "active"
        self._reported = float("-inf")

    def _move(self, key: int, state: str | None) -> None:
        old = self._heard.pop(key, None)
        if old is not None:
            self._counts[old] -= 1
        if state is not None:
            self._heard[key] = state
            self._counts[state] += 1

    def observe(self, promise: Promise[Any], pending: PendingResult) -> None:
        """Take a "pending" answer of an operation; it counts until the future ends."""
        key = id(promise)
        if key not in self._heard:
            promise.future.add_done_callback(lambda _: self._move(key, None))
        promise.note(
            queue_state=pending.queue_state,
            queue_state_reason=pending.reason,
            position=pending.position,
        )
        # A server that says nothing about its queue is not paused.
        mine = "active" if pending.queue_state == "unknown" else pending.queue_state
        self._move(key, mine)
        state = self._counts.most_common(1)[0][0]
        now = self._clock.now()
        changed = state != self._state
        if now - self._reported < _EVERY_S or (state == "active" and not changed):
            return
        # A state is explained by a request that is in it.
        if mine != state:
            return
        self._state, self._reported = state, now
        if state == "active":
            _log.info("%s: the queue moves again", self._subject)
        else:
            reason = pending.reason or _DEFAULT_REASONS.get(state, "no reason given")
            _log.warning("%s is paused (%s): %s", self._subject, state, reason)
        if changed:
            self._report(state, pending.reason, promise.operation.request_id)

    def _report(self, state: str, reason: str | None, request_id: str | None) -> None:
        if self._on_change is not None:
            self._on_change(state, reason)
        if self._telemetry is not None:
            # Not the reason: it is the server's text.
            data = {"queue_state": state, "request_id": request_id}
            self._telemetry.event("queue_state_changed", data)


class Callback:
    """Runs a user's function on a daemon thread, one call after the other."""

    def __init__(self, function: Callable[..., object]) -> None:
        # Mutable state: calls that wait, and whether a thread runs them; guarded by the lock.
        self._function = function
        self._lock = threading.Lock()
        self._calls: deque[tuple[Any, ...]] = deque()
        self._running = False

    def __call__(self, *args: Any) -> None:
        with self._lock:
            self._calls.append(args)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="tinkex-callback", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                args = self._calls.popleft()
            try:
                self._function(*args)
            except Exception:  # noqa: BLE001 - the user's function is no part of the operation
                _log.exception("on_queue_state_change failed")
