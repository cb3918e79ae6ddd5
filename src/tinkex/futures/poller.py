"""Fetches the result of one accepted request by long-polling `retrieve_future`.

A wait has no retry count. It ends with the result, with the server's error, or when the server
has given no sign of life for `silence_s`: an honest "pending" is one, a broken connection, a 5xx
and a 429 are not. What an unsuccessful answer means is decided by `transport.retry`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    InputError,
    RequestFailedError,
    ResponseInfo,
    ServerSilentError,
)
from tinkex.spans import span
from tinkex.transport.retry import Limits, Progress, decide, outcome_of
from tinkex.types import FutureRetrieveRequest
from tinkex.types.usage import Usage
from tinkex.wire import json_codec, routes
from tinkex.wire.results import (
    Failed,
    MetadataOnly,
    Pending,
    Ready,
    accept_for,
    decode_pending,
    decode_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.errors import TinkerError
    from tinkex.futures.budget import ByteBudget
    from tinkex.transport.api import Api
    from tinkex.transport.base import Reply

# A "pending" that comes back sooner than this was not held by the server; asking again at once
# would make a hot loop out of it.
_HELD_S = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """An accepted request whose result can be asked for."""

    request_id: str
    request_type: routes.RequestType
    sequence_ids: Sequence[str] | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A result and what the server says it cost; times are None when it does not say."""

    value: Any
    queue_s: float | None = None
    device_s: float | None = None


@dataclass(slots=True)
class _Wait:
    """What one wait remembers between answers."""

    ticket: Ticket
    observe: Callable[[Pending], None]
    started: float
    last_life: float
    allow_metadata_only: bool
    iteration: int = 0
    failures: int = 0
    unheld: int = 0
    billing_s: float = 0.0


class Poller:
    """Waits for results on one connection set; shared by all clients of a session."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        budget: ByteBudget,
        *,
        silence_s: float,
        total_s: float | None = None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._budget = budget
        self._silence_s = silence_s
        self._total_s = total_s

    async def wait(
        self,
        ticket: Ticket,
        observe: Callable[[Pending], None],
        *,
        known_size: int | None = None,
    ) -> Result:
        """The result of `ticket`; `observe` hears every honest "pending".

        `known_size` is a payload size announced elsewhere: room for it is taken first, and the
        server need not announce it again.
        """
        now = self._clock.now()
        wait = _Wait(ticket, observe, now, now, allow_metadata_only=not known_size)
        reserved = known_size or 0
        if reserved:
            await self._budget.take(reserved)
        try:
            while True:
                answer = await self._ask(wait)
                if isinstance(answer, Result):
                    return answer
                if isinstance(answer, MetadataOnly):
                    await self._budget.take(answer.size_bytes)
                    reserved += answer.size_bytes
                    wait.allow_metadata_only = False
        finally:
            if reserved:
                self._budget.give_back(reserved)

    async def _ask(self, wait: _Wait) -> Result | MetadataOnly | None:
        """One poll, with the pause that must follow it; None when it brought nothing."""
        asked = self._clock.now()
        try:
            body, headers = _question(wait)
            reply = await self._api.send(
                routes.RETRIEVE_FUTURE, body, headers=headers, timeout_s=self._timeout_s(wait)
            )
            if reply.status == 408:
                return await self._pending(wait, decode_pending(reply.body), asked)
            self._api.raise_for(reply, routes.RETRIEVE_FUTURE)
        except (APIConnectionError, APIStatusError) as error:
            await self._after_failure(wait, error)
            return None
        answer = _read(wait.ticket, reply)
        if isinstance(answer, Pending):
            return await self._pending(wait, answer, asked)
        if isinstance(answer, Failed):
            raise RequestFailedError(
                self._api.scrub(answer.error), wait.ticket.request_id, answer.category
            )
        if isinstance(answer, Ready):
            return _result(answer.value, reply.headers.get("x-tinkex-usage"))
        return answer

    async def _pending(self, wait: _Wait, pending: Pending, asked: float) -> None:
        now = self._clock.now()
        wait.last_life, wait.failures, wait.billing_s = now, 0, 0.0
        wait.observe(pending)
        wait.unheld = wait.unheld + 1 if now - asked < _HELD_S else 0
        pause_s = min(0.02 * 2.0 ** min(wait.unheld, 6), 1.0) if wait.unheld else 0.0
        self._check_total(wait, pause_s, None)
        if pause_s:
            await self._clock.sleep(pause_s)

    async def _after_failure(self, wait: _Wait, error: APIConnectionError | APIStatusError) -> None:
        """Wait as the table says, or raise."""
        silent_s = self._clock.now() - wait.last_life
        decision = decide(
            outcome_of(error),
            "poll",
            Progress(wait.failures, silent_s, wait.billing_s),
            Limits(
                self._silence_s,
                self._api.client_config.billing_exception_max_pause_duration_sec,
            ),
            jitter=random.random(),
            wall=self._clock.wall(),
        )
        if decision.wait_s is None:
            if silent_s - wait.billing_s < self._silence_s:
                raise error
            raise ServerSilentError(
                f"no sign of life from the server for {silent_s:.0f} s while waiting for "
                f"{wait.ticket.request_type} {wait.ticket.request_id} (last problem: {error}); "
                "check that the server runs and is reachable, then send the request again"
            ) from error
        self._check_total(wait, decision.wait_s, error)
        wait.failures += 1
        wait.billing_s += decision.wait_s if decision.billing else 0.0
        await self._clock.sleep(decision.wait_s)

    def _timeout_s(self, wait: _Wait) -> float | None:
        """A poll that is held by the server must not outlast the total deadline."""
        if self._total_s is None:
            return None
        left_s = wait.started + self._total_s - self._clock.now()
        return min(routes.RETRIEVE_FUTURE.timeout_s, max(left_s, 0.001))

    def _check_total(self, wait: _Wait, pause_s: float, cause: TinkerError | None) -> None:
        if self._total_s is None:
            return
        if self._clock.now() + pause_s - wait.started > self._total_s:
            raise ServerSilentError(
                f"{wait.ticket.request_type} {wait.ticket.request_id} did not finish within the "
                f"total deadline of {self._total_s:.0f} s"
            ) from cause


def _question(wait: _Wait) -> tuple[bytes, dict[str, str]]:
    """The body and headers of the next poll."""
    ticket = wait.ticket
    headers = {
        "Accept": accept_for(ticket.request_type),
        "X-Tinker-Request-Type": ticket.request_type,
        "X-Tinker-Request-Iteration": str(wait.iteration),
    }
    if wait.iteration == 0 and ticket.round_trip_s is not None:
        headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{ticket.round_trip_s:.6f}"
    wait.iteration += 1
    request = FutureRetrieveRequest(
        request_id=ticket.request_id, allow_metadata_only=wait.allow_metadata_only
    )
    return json_codec.encode(request), headers


def _read(ticket: Ticket, reply: Reply) -> Pending | MetadataOnly | Failed | Ready:
    media_type = reply.headers.get("content-type", "")
    try:
        with span("futures.decode", request_id=ticket.request_id, size_bytes=len(reply.body)):
            return decode_result(ticket.request_type, media_type, reply.body, ticket.sequence_ids)
    except InputError as error:
        response = ResponseInfo(reply.status, {"content-type": media_type})
        raise APIResponseValidationError(
            response, None, f"{ticket.request_type} {ticket.request_id}: {error}"
        ) from error


def _result(value: Any, usage_header: str | None) -> Result:
    if not usage_header:
        return Result(value)
    try:
        usage = msgspec.json.decode(usage_header, type=dict[str, float | None])
    except msgspec.MsgspecError:
        return Result(value)  # a server with another idea of this header; its result still counts
    return Result(value, usage.get("queue_s"), usage.get("device_s"))


def charge(result: Result, value: object, **tokens: int) -> Usage:
    """Note on `value` what it used: tokens as counted here, times as the server gave them."""
    usage = Usage(**tokens, queue_s=result.queue_s, device_s=result.device_s)
    # The value was decoded a moment ago and nobody else has seen it, so it is still ours to write.
    if isinstance(value, msgspec.Struct):
        msgspec.structs.force_setattr(value, "usage", usage)
    else:
        object.__setattr__(value, "usage", usage)
    return usage
