"""`Lifecycle`: the one owner of a logical call, from submission to result.

It owns the deadlines of the call: its last sign of life, since when the account has been out of
credit, and how often each kind of failure was retried. Nothing below it retries.

| state | what happens | leads to |
|---|---|---|
| waiting | for a slot, bytes, the shared pause or a backoff | sending; cancelled: ended |
| sending | on the wire, always with the same number | accepted; to retry: waiting; refused: ended |
| accepted | the feed or a poll brings the result | ended; lost: waiting, to be sent again |
| ended | with a result, an error, or cancelled on the server | |

- *Sending* is never interrupted by the caller's cancellation (`Promise.on_wire`): an accepted
  request whose caller has gone is cancelled on the server, and its number is known to be used.
- *Silence*: any HTTP answer to a submission is a sign of life; for a result only an honest
  "pending" is, because a server that answers polls with errors is not computing. Waiting in this
  process (slots, budgets, pauses) does not count as silence.
- *Total deadline*: the caller bounds the whole with `CallContext.limit`.

What a failure means is decided by `transport.retry`.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tinkex.clock import time_limit
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    InputError,
    PromiseLostError,
    RequestFailedError,
    ResponseInfo,
    ServerSilentError,
    TinkerError,
)
from tinkex.futures.call_results import Ticket, TimedResult
from tinkex.metrics import meter
from tinkex.spans import span
from tinkex.transport.notices import wait_reason
from tinkex.transport.retry import (
    BILLING_STEP_S,
    AttemptOutcome,
    Decision,
    RetryLimits,
    RetryProgress,
    decide,
    event_of,
    outcome_of,
    random_share,
    retry_after_s,
)
from tinkex.types import FutureRetrieveRequest
from tinkex.types.value import Usage
from tinkex.wire import json_codec, routes
from tinkex.wire.results import (
    ACCEPT,
    FailedResult,
    MetadataOnly,
    PendingResult,
    ReadyResult,
    decode_pending,
    decode_result,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from tinkex.clock import Clock
    from tinkex.futures.admission import ByteBudget, SampleAdmission
    from tinkex.futures.feed import CompletionFeed
    from tinkex.futures.future import Promise
    from tinkex.metrics import WaitReason
    from tinkex.transport.api import Api
    from tinkex.transport.retry import RetryClass
    from tinkex.types import UntypedAPIFuture

    Fate = Literal["unsent", "unknown", "refused", "accepted"]
    Post = Callable[[int], Coroutine[Any, Any, UntypedAPIFuture]]
    Room = Callable[[], AbstractAsyncContextManager[object]]
    Observe = Callable[[Promise[Any], PendingResult], None]

# A "pending" that comes back sooner than this was not held by the server; asking again at once
# would make a hot loop out of it.
_HELD_S = 1.0
# How often an error is retried only because the user's RetryConfig names it.
_EXTENDED_TRIES = 10
# What a client waits for while the server says that its queue is paused.
_PAUSES: dict[str, WaitReason] = {
    "paused_capacity": "capacity",
    "paused_rate_limit": "rate_limit",
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What the user of a sampling client and the server's flags say about its retries.

    `delay_s` is the wait before a retry, given their number so far and a draw from [0, 1).
    """

    retries: bool
    patience_s: float
    retryable_exceptions: tuple[type[Exception], ...]
    delay_s: Callable[[int, float], float]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What all calls of one session share.

    `cancel` cancels a request on the server, soon, after its caller has gone.
    """

    api: Api
    clock: Clock
    response_bytes: ByteBudget
    cancel: Callable[[str], None]
    silence_s: float
    submit_s: float
    total_s: float | None = None

    @asynccontextmanager
    async def limit(self, what: str, since: float) -> AsyncGenerator[None]:
        """Bound the body by the total deadline, counted from `since`."""
        if self.total_s is None:
            yield
            return
        async with time_limit(self.clock, since + self.total_s - self.clock.now()) as limit:
            yield
        if limit.expired:
            raise ServerSilentError(
                f"{what} did not finish within the total deadline of {self.total_s:g} s; it was "
                "cancelled. Give it more time with total_deadline_s, or look at its status() to "
                "see what it waits for"
            )


class Lifecycle:
    """One request and its result: `submit` first, then `result` or `finish`."""

    __slots__ = (
        "_admission",
        "_context",
        "_counts",
        "_credit_gone_at",
        "_feed",
        "_kind",
        "_observe",
        "_pause_s",
        "_policy",
        "_poll_counts",
        "_promise",
        "_retry",
        "_route",
        "_trouble_at",
        "attempts",
        "fate",
        "last_life",
    )

    def __init__(
        self,
        context: CallContext,
        route: routes.Route[Any, Any],
        kind: routes.RequestType,
        promise: Promise[Any],
        observe: Observe,
        *,
        policy: RetryPolicy | None = None,
        admission: SampleAdmission | None = None,
        pause_s: float = 1.0,
        feed: CompletionFeed | None = None,
    ) -> None:
        # Mutable state: the last sign of life; since when submitting has failed, and since when
        # for want of credit; tries by kind of failure; how often the request was sent; and what is
        # known of it. A thousand of these are in flight, so it holds no closures.
        self._context = context
        self._route = route
        self._kind: routes.RequestType = kind
        self._retry: RetryClass = route.retry
        self._promise = promise
        self._observe = observe
        self._policy = policy
        self._admission = admission
        self._pause_s = pause_s
        self._feed = feed
        self.last_life = context.clock.now()
        self._trouble_at: float | None = None
        self._credit_gone_at: float | None = None
        self._counts: dict[str, int] = {}
        self._poll_counts: dict[str, int] = {}
        self.attempts = 0
        self.fate: Fate = "unsent"

    # -- submission -----------------------------------------------------------------------------

    async def submit(self, post: Post, room: Room | None = None) -> Ticket:
        """Send until the server has accepted the request; `post` makes one attempt.

        `room` holds a local place while a request is on the wire.
        """
        clock = self._context.clock
        asked = clock.now()
        retries = 0
        while True:
            began = clock.now()
            try:
                if room is None:
                    accepted = await self._post(post, retries)
                else:
                    async with room():
                        waited_s = clock.now() - began
                        began += waited_s
                        # Waiting in this process says nothing about the server.
                        self.last_life += waited_s
                        if self._trouble_at is not None:
                            self._trouble_at += waited_s
                        accepted = await self._post(post, retries)
            except TinkerError as error:
                wait_s = self._submit_wait_s(error, began)
            else:
                break
            # Outside the handler: an error of the next attempt must not drag this one along.
            await clock.sleep(wait_s)
            # The header that says it is one of HTTP-level retries, which samples do not have.
            retries += self._retry != "sample"
        self.last_life = clock.now()
        self._trouble_at = self._credit_gone_at = None
        return Ticket(
            accepted.request_id,
            self._kind,
            accepted.sample_sequence_ids,
            self.last_life - asked,
        )

    async def _post(self, post: Post, retries: int) -> UntypedAPIFuture:
        promise = self._promise
        self.attempts += 1
        promise.operation.attempts = self.attempts
        before, self.fate = self.fate, "unknown"
        # Until the answer is there the task is not cancelled: the server may have accepted.
        promise.on_wire += 1
        try:
            accepted = await post(retries)
        except APIStatusError as error:
            # No server gives these answers to what it has accepted. An earlier attempt whose
            # fate is unknown stays unknown.
            if error.status_code < 500 and error.status_code != 408 and before != "unknown":
                self.fate = "refused"
            raise
        finally:
            promise.on_wire -= 1
            if promise.cancelling:
                promise.cancel_task()
        self.fate = "accepted"
        if promise.cancelling:
            self._abandon(accepted.request_id)
            raise asyncio.CancelledError
        return accepted

    def _submit_wait_s(self, error: TinkerError, began: float) -> float:
        """How long to wait before the request is sent again; raises when that cannot help."""
        now, outcome = self._context.clock.now(), outcome_of(error)
        event = event_of(outcome)
        if outcome.kind == "status":
            self.last_life = now
        if event == "402" and self._retry != "submit":
            return self._credit_wait_s(error, now)
        self._credit_gone_at = None
        if event == "429":
            # A server that says so is neither silent nor in trouble.
            self._trouble_at = None
            if self._admission is not None:
                hint_s = retry_after_s(outcome.headers, self._context.clock.wall())
                # The next `room` waits for the end of the pause.
                self._admission.pause(self._pause_s if hint_s is None else hint_s, error)
                return 0.0
        elif self._trouble_at is None:
            self._trouble_at = began
        if self._policy is not None and not self._policy.retries:
            raise error
        return self._retry_wait_s(error, outcome, now)

    def _credit_wait_s(self, error: TinkerError, now: float) -> float:
        """The pause after a 402, which has a limit of its own."""
        self._check_credit(error, now)
        if self._admission is not None:
            self._admission.pause(BILLING_STEP_S, error)
            return 0.0
        if self._trouble_at is not None:
            self._trouble_at += BILLING_STEP_S
        return self._logged(Decision(BILLING_STEP_S, "status 402", billing=True))

    def _retry_wait_s(self, error: TinkerError, outcome: AttemptOutcome, now: float) -> float:
        """The wait that the table or the user's policy asks for, within the deadline."""
        context, policy, event = self._context, self._policy, event_of(outcome)
        tries = self._counts.get(event, 0)
        budget_s, elapsed_s = math.inf, 0.0
        if self._trouble_at is not None:
            budget_s = context.submit_s if policy is None else policy.patience_s
            elapsed_s = now - self._trouble_at
        decision = decide(
            outcome,
            self._retry,
            RetryProgress(tries, elapsed_s, failures=sum(self._counts.values())),
            RetryLimits(budget_s),
            jitter=random_share(),
            wall=context.clock.wall(),
        )
        self._counts[event] = tries + 1
        if decision.wait_s is not None:
            if policy is None or retry_after_s(outcome.headers, context.clock.wall()) is not None:
                return self._logged(decision)
            wait_s = min(self._policy_delay_s(tries), budget_s - elapsed_s)
            return self._measured(wait_s, "backoff")
        if self._extended(error, tries):
            return self._measured(self._policy_delay_s(tries), "backoff")
        raise self._final(error, decision.reason)

    def _logged(self, decision: Decision) -> float:
        """The wait that was decided on, after it was logged and measured."""
        self._context.api.notices.waiting(self._route.name, decision)
        return decision.wait_s or 0.0

    def _measured(self, wait_s: float, reason: WaitReason) -> float:
        if meter.on:
            meter.retry(self._route.name, reason, wait_s)
        return wait_s

    def _final(self, error: TinkerError, reason: str) -> TinkerError:
        """The error that ends a submission."""
        attempts = sum(self._counts.values())
        if self._retry == "sample" and isinstance(error, APIConnectionError):
            silent_s = self._context.clock.now() - self.last_life
            silent = ServerSilentError(
                f"no sign of life from the server for {silent_s:.0f} s; the sample keeps failing: "
                f"{error}; check that the server runs and is reachable"
            )
            silent.__cause__ = error
            return silent
        if attempts > 1:
            error.add_note(f"gave up after {attempts} attempts: {reason}")
        return error

    def _check_credit(self, error: TinkerError, now: float) -> None:
        """Raise when the account could not pay for longer than the server's flag allows."""
        if self._credit_gone_at is None:
            self._credit_gone_at = now
        flags = self._context.api.client_config
        end = self._credit_gone_at + flags.billing_exception_max_pause_duration_sec
        if now + BILLING_STEP_S > end:
            raise error

    def _extended(self, error: TinkerError, tries: int) -> bool:
        """Whether the user's own list of exceptions asks for what the table does not."""
        policy = self._policy
        if policy is None or not isinstance(error, policy.retryable_exceptions):
            return False
        known = (APIConnectionError, PromiseLostError)
        return not isinstance(error, known) and tries < _EXTENDED_TRIES

    def _policy_delay_s(self, tries: int) -> float:
        assert self._policy is not None
        return self._policy.delay_s(tries, random_share())

    # -- the result -----------------------------------------------------------------------------

    async def finish(
        self, ticket: Ticket, again: Callable[[], Coroutine[Any, Any, Ticket]]
    ) -> TimedResult:
        """The result, submitting `again` when the server has lost it."""
        while True:
            try:
                return await self.result(ticket)
            except (PromiseLostError, RequestFailedError) as error:
                wait_s = self._resend_wait_s(error)
            await self._context.clock.sleep(wait_s)
            ticket = await again()

    def _resend_wait_s(self, error: PromiseLostError | RequestFailedError) -> float:
        if self._policy is not None and not self._policy.retries:
            raise error
        outcome = outcome_of(error, of_result=True)
        event = event_of(outcome)
        tries = self._counts.get(event, 0)
        # Counted over the whole call: that a request is accepted each time is no progress.
        self._counts[event] = tries + 1
        decision = decide(outcome, self._retry, RetryProgress(tries), jitter=random_share())
        if self._policy is not None and (decision.retry or self._extended(error, tries)):
            return self._measured(self._policy_delay_s(tries), "backoff")
        if decision.wait_s is None:
            raise error
        return self._measured(decision.wait_s, "backoff")

    async def result(self, ticket: Ticket) -> TimedResult:
        """The result of an accepted request; cancelled with the caller."""
        feed = self._feed
        try:
            if feed is None:
                return await self._poll(ticket, None)
            size_bytes = await feed.finished(ticket.request_id)
            self.last_life = max(self.last_life, feed.last_life)
            result = await self._poll(ticket, size_bytes)
        except asyncio.CancelledError:
            self._abandon(ticket.request_id)
            raise
        except TinkerError as error:
            if feed is not None:
                if isinstance(error, PromiseLostError):
                    feed.lost()
                feed.retrieved(ticket.request_id)
            raise
        feed.retrieved(ticket.request_id)
        return result

    def _abandon(self, request_id: str) -> None:
        """Cancel an accepted request on the server: its caller was cancelled."""
        self._context.cancel(request_id)
        if self._feed is not None:
            self._feed.abandoned(request_id)

    async def _poll(self, ticket: Ticket, known_size: int | None) -> TimedResult:
        """Ask until there is an answer; `known_size` is a payload size announced by the feed."""
        poll = _Poll(ticket, allow_metadata_only=not known_size)
        reserved = known_size or 0
        if reserved:
            await self._reserve(reserved)
        try:
            while True:
                answer = await self._ask(poll)
                if isinstance(answer, TimedResult):
                    return answer
                if isinstance(answer, MetadataOnly):
                    await self._reserve(answer.size_bytes)
                    reserved += answer.size_bytes
                    poll.allow_metadata_only = False
        finally:
            if reserved:
                self._context.response_bytes.give_back(reserved)

    async def _reserve(self, size_bytes: int) -> None:
        began = self._context.clock.now()
        await self._context.response_bytes.take(size_bytes)
        # Waiting in this process says nothing about the server.
        self.last_life += self._context.clock.now() - began

    async def _ask(self, poll: _Poll) -> TimedResult | MetadataOnly | None:
        """One poll, with the pause that must follow it; None when it brought nothing."""
        api, asked, ticket = self._context.api, self._context.clock.now(), poll.ticket
        headers = {
            "Accept": ACCEPT[ticket.request_type],
            "X-Tinker-Request-Type": ticket.request_type,
            "X-Tinker-Request-Iteration": str(poll.iteration),
        }
        if poll.iteration == 0 and ticket.round_trip_s is not None:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{ticket.round_trip_s:.6f}"
        poll.iteration += 1
        request = FutureRetrieveRequest(
            request_id=ticket.request_id, allow_metadata_only=poll.allow_metadata_only
        )
        try:
            reply = await api.send(
                routes.RETRIEVE_FUTURE, json_codec.encode(request), headers=headers
            )
            if reply.status != 200:
                pending = decode_pending(reply.body) if reply.status == 408 else None
                if pending is not None:
                    return await self._pending(poll, pending, asked)
                api.raise_for(reply, routes.RETRIEVE_FUTURE)
        except (APIConnectionError, APIStatusError) as error:
            await self._context.clock.sleep(self._poll_wait_s(ticket, error))
            return None
        kind, media_type = ticket.request_type, reply.headers.get("content-type", "")
        try:
            with span("futures.decode", request_id=ticket.request_id, size_bytes=len(reply.body)):
                answer = decode_result(kind, media_type, reply.body, ticket.sequence_ids)
        except InputError as error:
            response = ResponseInfo(reply.status, {"content-type": media_type})
            problem = f"{kind} {ticket.request_id}: {error}"
            raise APIResponseValidationError(response, None, problem) from error
        if isinstance(answer, ReadyResult):
            usage_header = reply.headers.get("x-tinkex-usage")
            return (
                _with_times(answer.value, usage_header)
                if usage_header
                else TimedResult(answer.value)
            )
        if isinstance(answer, PendingResult):
            return await self._pending(poll, answer, asked)
        if isinstance(answer, FailedResult):
            raise RequestFailedError(api.scrub(answer.error), ticket.request_id, answer.category)
        return answer

    async def _pending(self, poll: _Poll, pending: PendingResult, asked: float) -> None:
        now = self._context.clock.now()
        self.last_life, self._credit_gone_at = now, None
        self._poll_counts.clear()
        self._observe(self._promise, pending)
        if meter.on and pending.queue_state in _PAUSES:
            meter.wait(_PAUSES[pending.queue_state], now - asked)
        poll.unheld = poll.unheld + 1 if now - asked < _HELD_S else 0
        if poll.unheld:
            await self._context.clock.sleep(min(0.02 * 2.0 ** min(poll.unheld, 6), 1.0))

    def _poll_wait_s(self, ticket: Ticket, error: APIConnectionError | APIStatusError) -> float:
        """How long to wait after a failed poll; raises when the wait is over."""
        context, now = self._context, self._context.clock.now()
        outcome = outcome_of(error)
        event = event_of(outcome)
        if event == "402":
            # Neither silence nor progress: the wait for credit has a limit of its own.
            self.last_life = now
            self._check_credit(error, now)
            # A result is waited for by itself; it does not pause those who submit.
            return self._measured(BILLING_STEP_S, "billing")
        self._credit_gone_at = None
        silent_s = now - self.last_life
        tries = self._poll_counts.get(event, 0)
        decision = decide(
            outcome,
            "poll",
            RetryProgress(tries, silent_s, failures=sum(self._poll_counts.values())),
            RetryLimits(context.silence_s),
            jitter=random_share(),
            wall=context.clock.wall(),
        )
        if decision.wait_s is not None:
            self._poll_counts[event] = tries + 1
            if meter.on:
                meter.retry(routes.RETRIEVE_FUTURE.name, wait_reason(decision), decision.wait_s)
            return decision.wait_s
        if silent_s < context.silence_s:
            raise error
        raise ServerSilentError(
            f"no sign of life from the server for {silent_s:.0f} s while waiting for "
            f"{ticket.request_type} {ticket.request_id} (last problem: {error}); check that the "
            "server runs and is reachable, then send the request again"
        ) from error


@dataclass(slots=True)
class _Poll:
    """What the polls of one request remember between answers."""

    ticket: Ticket
    allow_metadata_only: bool
    iteration: int = 0
    unheld: int = 0


def charge(result: TimedResult, **tokens: int) -> Usage:
    """Note on a result's value what it used: tokens as counted here, times as the server said."""
    usage = Usage(**tokens, queue_s=result.queue_s, device_s=result.device_s)
    # No caller has seen the value yet, so it may still be written to.
    if isinstance(result.value, msgspec.Struct):
        msgspec.structs.force_setattr(result.value, "usage", usage)
    else:
        object.__setattr__(result.value, "usage", usage)
    if meter.on:
        meter.usage(usage)
    return usage


def _with_times(value: Any, usage_header: str) -> TimedResult:
    try:
        usage = msgspec.json.decode(usage_header, type=dict[str, float | None])
    except msgspec.MsgspecError:
        return TimedResult(value)  # another server's use of this header: the result still counts
    return TimedResult(value, usage.get("queue_s"), usage.get("device_s"))
