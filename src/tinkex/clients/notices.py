"""Tells the user when the server's queue pauses, and when it goes on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.clients.telemetry import Telemetry
    from tinkex.clock import Clock
    from tinkex.futures.future import Promise
    from tinkex.wire.results import Pending

_log = logging.getLogger(__name__)
_EVERY_S = 60.0
_DEFAULT_REASONS = {
    "paused_rate_limit": "the rate limit is reached; fewer requests in flight will help",
    "paused_capacity": "the server is at capacity; the request waits its turn",
}


class QueueNotices:
    """What one client last heard about the queue."""

    def __init__(
        self,
        subject: str,
        clock: Clock,
        on_change: Callable[[str, str | None], None],
        telemetry: Telemetry | None = None,
    ) -> None:
        # Mutable state: the last queue state and when it was last logged.
        self._subject = subject
        self._clock = clock
        self._on_change = on_change
        self._telemetry = telemetry
        self._state = "active"
        self._logged: float | None = None

    def observe(self, pending: Pending, promise: Promise[Any]) -> None:
        """Note one honest "pending" answer."""
        promise.note(
            queue_state=pending.queue_state,
            queue_state_reason=pending.reason,
            position=pending.position,
        )
        # A server that says nothing about its queue is not paused.
        state = "active" if pending.queue_state == "unknown" else pending.queue_state
        changed, self._state = state != self._state, state
        if changed:
            self._tell(state, pending.reason, promise.standing.request_id)
        now = self._clock.now()
        if state == "active":
            if changed:
                _log.info("%s: the queue moves again", self._subject)
            self._logged = None
        elif changed or self._logged is None or now - self._logged >= _EVERY_S:
            self._logged = now
            reason = pending.reason or _DEFAULT_REASONS.get(state, "no reason given")
            _log.warning("%s is paused (%s): %s", self._subject, state, reason)

    def _tell(self, state: str, reason: str | None, request_id: str | None) -> None:
        try:
            self._on_change(state, reason)
        except Exception:  # noqa: BLE001 - the user's hook is no part of the operation
            _log.exception("on_queue_state_change failed")
        if self._telemetry is not None:
            # Not the reason: it is the server's text.
            data = {"queue_state": state, "request_id": request_id}
            self._telemetry.event("queue_state_changed", data)
