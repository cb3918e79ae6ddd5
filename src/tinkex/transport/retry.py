"""When to try again: one table and one pure function.

`decide` is asked by the owner of a call's only retry loop: `futures.lifecycle` for everything that
has a future, `Api.call` for what is answered directly. `full`, `submit` and `sample` are classes of
requests, `poll` is asking for a result; nothing retries `none`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    CredentialError,
    PromiseLostError,
    RequestFailedError,
    TinkerError,
)

RetryClass = Literal["full", "submit", "none", "sample", "poll"]
Action = Literal["raise", "backoff", "hint", "billing", "again"]

MAX_HINT_S: Final = 60.0
BILLING_STEP_S: Final = 5.0
BASE_S = 0.5
_JITTER = 0.25
# Not the functions of the module: programs seed those, and retries happen on another thread.
random_share: Callable[[], float] = random.Random().random
"""A new share of the jitter, from 0 to 1."""
# A budget with less than this left is spent: a rounding error is no time to wait.
_SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How one attempt ended: an HTTP status, or one of the ways to end without a usable one."""

    kind: Literal["status", "connection", "timeout", "lost", "failed", "bad_response", "credential"]
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    category: str = "unknown"


@dataclass(frozen=True, slots=True)
class RetryProgress:
    """How far a call has come.

    `retries` counts those after this kind of failure, `failures` those of any kind, `elapsed_s` is
    since the trouble began, and `billing_s` seconds of it in a 402 pause.
    """

    retries: int = 0
    elapsed_s: float = 0.0
    billing_s: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """When to give up. Time in a 402 pause has a limit of its own and counts for no other."""

    budget_s: float = 300.0
    billing_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Wait and try again, or (`wait_s` is None) give up."""

    wait_s: float | None
    reason: str
    billing: bool = False

    @property
    def retry(self) -> bool:
        """Whether to try again."""
        return self.wait_s is not None


@dataclass(frozen=True, slots=True)
class RetryRule:
    """What one class does about one event. `tries` limits this event on top of the budget."""

    action: Action
    tries: int | None = None
    cap_s: float = 30.0


_RAISE = RetryRule("raise")
_SUBMIT_TRIES = 11


def _row(
    full: RetryRule,
    submit: RetryRule | None = None,
    sample: RetryRule = _RAISE,
    poll: RetryRule = _RAISE,
) -> dict[RetryClass, RetryRule]:
    if submit is None:
        submit = RetryRule(full.action, full.tries or _SUBMIT_TRIES, full.cap_s)
        submit = _RAISE if full.action == "raise" else submit
    return {"full": full, "submit": submit, "none": _RAISE, "sample": sample, "poll": poll}


_BACKOFF = RetryRule("backoff")
_SAMPLE_BACKOFF = RetryRule("backoff", cap_s=10.0)
TABLE: dict[str, dict[RetryClass, RetryRule]] = {
    "connection": _row(_BACKOFF, sample=_SAMPLE_BACKOFF, poll=_BACKOFF),
    "timeout": _row(_BACKOFF, sample=_SAMPLE_BACKOFF, poll=_BACKOFF),
    "402": _row(
        RetryRule("billing"), submit=_RAISE, sample=RetryRule("billing"), poll=RetryRule("billing")
    ),
    "408": _row(_BACKOFF, sample=_SAMPLE_BACKOFF, poll=RetryRule("backoff", cap_s=1.0)),
    # Usually a fact ("already published"), sometimes a race: a short second look is enough.
    "409": _row(RetryRule("backoff", tries=3), sample=RetryRule("backoff", tries=3, cap_s=10.0)),
    "410": _row(_RAISE),
    # Lost to a restart, so it is sent again; a server that keeps losing results is broken.
    "lost": _row(
        RetryRule("again", tries=4, cap_s=10.0),
        submit=RetryRule("again", tries=4, cap_s=10.0),
        sample=RetryRule("again", tries=10, cap_s=10.0),
    ),
    "429": _row(RetryRule("hint"), sample=RetryRule("hint", cap_s=10.0), poll=RetryRule("hint")),
    "5xx": _row(RetryRule("hint"), sample=RetryRule("hint", cap_s=10.0), poll=RetryRule("hint")),
    "4xx": _row(_RAISE),
    "bad_response": _row(_RAISE),
    "failed user": _row(_RAISE),
    # A training step keeps its sequence number, so sending it again finds the same failure.
    "failed": _row(_RAISE, sample=RetryRule("again", tries=3, cap_s=10.0)),
    "credential": _row(_RAISE),
}


def decide(
    outcome: AttemptOutcome,
    retry: RetryClass,
    progress: RetryProgress = RetryProgress(),  # noqa: B008 - frozen
    limits: RetryLimits = RetryLimits(),  # noqa: B008 - frozen
    *,
    jitter: float = 0.0,
    wall: float = 0.0,
) -> Decision:
    """What to do after a failed attempt. `jitter` is uniform in [0, 1); `wall` is epoch seconds."""
    event = event_of(outcome)
    rule = _overridden(TABLE[event][retry], outcome, retry)
    reason = _reason(outcome)
    if rule.action == "raise":
        return Decision(None, f"{reason}: trying again would not help")
    if rule.action == "billing":
        if progress.billing_s + BILLING_STEP_S > limits.billing_s:
            return Decision(None, f"{reason} for {progress.billing_s:.0f} s")
        return Decision(BILLING_STEP_S, reason, billing=True)
    if rule.tries is not None and progress.retries + 1 >= rule.tries:
        return Decision(None, f"{reason} after {progress.retries + 1} tries")
    left_s = limits.budget_s - (progress.elapsed_s - progress.billing_s)
    if left_s < _SHORTEST_S:
        return Decision(None, f"{reason}, and {limits.budget_s:g} s have passed")
    # Kinds of failure have limits of their own, and one backoff.
    failures = max(progress.retries, progress.failures)
    wait_s = _wait_s(rule, outcome, failures, jitter, wall)
    # Clipped rather than refused: the last attempt is made when the time is up.
    return Decision(min(wait_s, left_s), reason)


def outcome_of(error: TinkerError, *, of_result: bool = False) -> AttemptOutcome:
    """How an attempt ended, by the error it raised.

    `of_result`: it was raised by asking for the result of an accepted request.
    """
    if of_result and isinstance(error, PromiseLostError):
        return AttemptOutcome("lost")
    if isinstance(error, APIStatusError):
        return AttemptOutcome("status", error.status_code, error.response.headers)
    if isinstance(error, APITimeoutError):
        return AttemptOutcome("timeout")
    if isinstance(error, APIConnectionError):
        return AttemptOutcome("connection")
    if isinstance(error, RequestFailedError):
        return AttemptOutcome("failed", category=error.category)
    return AttemptOutcome("credential" if isinstance(error, CredentialError) else "bad_response")


def event_of(outcome: AttemptOutcome) -> str:
    """The row of the table an outcome belongs to."""
    if outcome.kind == "failed":
        return "failed user" if outcome.category == "user" else "failed"
    if outcome.kind != "status":
        return outcome.kind
    if outcome.status >= 500:
        return "5xx"
    known = str(outcome.status)
    return known if known in TABLE else "4xx"


def retry_after_s(headers: Mapping[str, str], wall: float) -> float | None:
    """The wait that the server asks for, in (0, 60] seconds, or None without a usable one.

    `retry-after-ms` beats `retry-after` in seconds beats `retry-after` as an HTTP date.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None and milliseconds > 0:
        return min(milliseconds / 1000.0, MAX_HINT_S)
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is None and text:
        seconds = _seconds_until(text, wall)
    if seconds is None or seconds <= 0:
        return None
    return min(seconds, MAX_HINT_S)


def backoff_s(retries: int, cap_s: float, jitter: float) -> float:
    """0.5, 1, 2 … `cap_s` seconds, each made up to a quarter shorter by `jitter` in [0, 1)."""
    # The exponent is bounded because 2.0**1024 overflows.
    return min(BASE_S * 2.0 ** min(retries, 16), cap_s) * (1.0 - _JITTER * jitter)


def _overridden(rule: RetryRule, outcome: AttemptOutcome, retry: RetryClass) -> RetryRule:
    """`x-should-retry` has the last word on HTTP-level retries."""
    if outcome.kind != "status" or retry not in ("full", "submit"):
        return rule
    wish = outcome.headers.get("x-should-retry", "").strip().lower()
    if wish == "false":
        return _RAISE
    if wish == "true" and rule.action == "raise":
        return TABLE["5xx"][retry]
    return rule


def _wait_s(
    rule: RetryRule, outcome: AttemptOutcome, retries: int, jitter: float, wall: float
) -> float:
    hint = retry_after_s(outcome.headers, wall) if rule.action == "hint" else None
    return hint if hint is not None else backoff_s(retries, rule.cap_s, jitter)


def _reason(outcome: AttemptOutcome) -> str:
    match outcome.kind:
        case "status":
            return f"status {outcome.status}"
        case "failed":
            return f"the server reported a failure ({outcome.category})"
        case "bad_response":
            return "the answer breaks the protocol"
        case "lost":
            return "the server has lost the result"
        case "credential":
            return "no usable credential"
        case "timeout" | "connection":
            return outcome.kind


def _number(text: str | None) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _seconds_until(text: str, wall: float) -> float | None:
    from email.utils import parsedate_to_datetime  # slow to import, and rarely needed

    try:
        moment = parsedate_to_datetime(text)
        return moment.timestamp() - wall
    except (ValueError, TypeError, OverflowError, IndexError, AttributeError):
        return None
