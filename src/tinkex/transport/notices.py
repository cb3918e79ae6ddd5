"""Log lines about calls that fail: cause and next step, not a line per retry."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinkex.errors import APITimeoutError
from tinkex.metrics import meter

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.errors import APIConnectionError
    from tinkex.metrics import WaitReason
    from tinkex.transport.retry import Decision

_log = logging.getLogger(__name__)
_EVERY_S = 60.0
_MAX_NOTES = 64


def wait_reason(decision: Decision) -> WaitReason:
    """Why a decision makes a call wait, as metrics name it."""
    if decision.billing:
        return "billing"
    return "rate_limit" if decision.reason == "status 429" else "backoff"


class Notices:
    """Log lines of one connection set, each kind at most once a minute."""

    def __init__(self, clock: Clock) -> None:
        # Mutable state: when each kind was last logged, and the deprecations logged.
        self._clock = clock
        self._last: dict[str, float] = {}
        self._deprecations: set[str] = set()

    def unreachable(self, call: str, error: APIConnectionError) -> None:
        """A connection failed."""
        if meter.on:
            meter.request(call, "timeout" if isinstance(error, APITimeoutError) else "connection")
        if self._due("unreachable"):
            _log.warning("%s: %s", call, error.message)

    def waiting(self, call: str, decision: Decision) -> None:
        """A call will be tried again."""
        if meter.on:
            meter.retry(call, wait_reason(decision), decision.wait_s)
        if decision.billing and self._due("billing"):
            _log.warning(
                "%s: the account cannot pay for this now (402); waiting until it can. Check the "
                "billing page, or cancel the call.",
                call,
            )
        elif wait_reason(decision) == "rate_limit" and self._due("rate_limit"):
            _log.warning(
                "%s: the server asks to send less (429); trying again until it accepts the request",
                call,
            )
        else:
            _log.debug("%s: trying again in %.1f s (%s)", call, decision.wait_s, decision.reason)

    def deprecated(self, note: str, level: str) -> None:
        """The server announces a deprecation; logged once."""
        if note not in self._deprecations and len(self._deprecations) < _MAX_NOTES:
            self._deprecations.add(note)
            _log.log(logging.ERROR if level == "error" else logging.WARNING, "%s", note)

    def _due(self, kind: str) -> bool:
        now = self._clock.now()
        due = now - self._last.get(kind, float("-inf")) >= _EVERY_S
        if due:
            self._last[kind] = now
        return due
