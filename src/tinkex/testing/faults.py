"""Scripted faults between the network and the server's app.

    server.faults.on("asample", rate_limit("retry-after-ms", 0.05), times=3)
    server.faults.on("retrieve_future", drop(), nth=0)
    server.faults.on("forward_backward", duplicate(), when=lambda seen: seen.json["seq_id"] == 2)

A rule names a route (as in `tinkex.wire.routes`) or None for all, which of the matching
calls it strikes, and an effect. The first rule that strikes decides; `fired` lists what
happened. On real sockets a dropped connection is really closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tinkex.testing.recorder import Exchange, SeenRequest

    Effect = Callable[["Exchange"], Awaitable[None]]

RetryAfterForm = Literal["retry-after-ms", "retry-after", "date", "none"]


@dataclass(slots=True)
class FaultRule:
    """When an effect strikes: matching calls `first` to `first + times - 1`, or all after."""

    effect: Effect
    name: str
    route: str | None
    first: int
    times: int | None
    when: Callable[[SeenRequest], bool] | None
    matched: int = 0


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened."""

    name: str
    request: SeenRequest


class Faults:
    """The script of one server."""

    def __init__(self) -> None:
        # Mutable state: the rules, which count the calls that they match, and what has happened.
        self._rules: list[FaultRule] = []
        self.fired: list[Fired] = []

    def on(
        self,
        route: str | None,
        effect: Effect,
        *,
        nth: int = 0,
        times: int | None = 1,
        when: Callable[[SeenRequest], bool] | None = None,
    ) -> None:
        """Add a rule: strike `times` matching calls from the `nth` on (0 is the first).

        `times=None` strikes every later call.
        """
        name = getattr(effect, "__qualname__", repr(effect)).split(".")[0]
        self._rules.append(FaultRule(effect, name, route, nth, times, when))

    def clear(self) -> None:
        """Remove all rules; what has happened stays."""
        self._rules.clear()

    def choose(self, request: SeenRequest) -> Effect | None:
        """The effect for a request; counts the request for every rule it matches."""
        chosen: FaultRule | None = None
        for rule in self._rules:
            if rule.route not in (None, request.route):
                continue
            if rule.when is not None and not rule.when(request):
                continue
            within = rule.times is None or rule.matched < rule.first + rule.times
            if chosen is None and rule.matched >= rule.first and within:
                chosen = rule
            rule.matched += 1
        if chosen is None:
            return None
        self.fired.append(Fired(chosen.name, request))
        return chosen.effect


def reply(
    status: int,
    body: bytes | Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    content_length: bool = True,
    media_type: str = MEDIA_JSON,
) -> Effect:
    """Answer with any status; the app never sees the request."""
    if body is None:
        body = {"detail": f"Scripted {status}."} if status != 204 else b""
    data = body if isinstance(body, bytes) else msgspec.json.encode(dict(body))

    async def reply(exchange: Exchange) -> None:
        await exchange.answer(
            status, data, {"content-type": media_type, **(headers or {})}, content_length
        )

    return reply


def empty(status: int, *, content_length: bool = True) -> Effect:
    """Answer with a status and no body at all."""

    async def empty(exchange: Exchange) -> None:
        await exchange.answer(status, b"", {}, content_length)

    return empty


def rate_limit(form: RetryAfterForm = "none", seconds: float = 1.0, status: int = 429) -> Effect:
    """A 429 (or another status) with a hint in one of its forms, or without one."""

    async def rate_limit(exchange: Exchange) -> None:
        hints = {
            "retry-after-ms": {"retry-after-ms": f"{seconds * 1000:g}"},
            "retry-after": {"retry-after": f"{seconds:g}"},
            "date": {"retry-after": formatdate(exchange.clock.wall() + seconds, usegmt=True)},
            "none": {},
        }
        body = b'{"detail":"Slow down."}'
        await exchange.answer(status, body, {"content-type": MEDIA_JSON, **hints[form]})

    return rate_limit


def try_again(queue_state: str = "active", reason: str | None = None, status: int = 200) -> Effect:
    """A "pending" reply of retrieve_future; `status=408` sends the same as a time-out."""

    async def try_again(exchange: Exchange) -> None:
        answer = {"type": "try_again", "queue_state": queue_state}
        answer["request_id"] = str(exchange.request.json.get("request_id", ""))
        if reason is not None:
            answer["queue_state_reason"] = reason
        await exchange.answer(status, msgspec.json.encode(answer), {"content-type": MEDIA_JSON})

    return try_again


def request_timeout(queue_state: str | None = None, reason: str | None = None) -> Effect:
    """A 408, with a queue state or without a body."""
    return empty(408) if queue_state is None else try_again(queue_state, reason, status=408)


def slow(seconds: float) -> Effect:
    """Wait, then let the request through."""

    async def slow(exchange: Exchange) -> None:
        await exchange.clock.sleep(seconds)
        await exchange.forward()

    return slow


def hang() -> Effect:
    """Accept the request and never answer."""

    async def hang(exchange: Exchange) -> None:
        await exchange.gone()

    return hang


def drop(*, handled: bool = False) -> Effect:
    """Close the connection without a byte of answer; `handled` lets the app do its work first."""

    async def drop(exchange: Exchange) -> None:
        if handled:
            await exchange.capture()
        await exchange.abort()

    return drop


def drop_midway(fraction: float = 0.5) -> Effect:
    """Send the head and a part of the real answer's body, then close the connection."""

    async def drop_midway(exchange: Exchange) -> None:
        answer = await exchange.capture()
        await exchange.start(answer.status, answer.headers)
        part = bytes(answer.body[: max(int(len(answer.body) * fraction), 1)])
        await exchange.send_body(part, more=True)
        await exchange.abort()

    return drop_midway


def trickle(chunk_bytes: int, delay_s: float) -> Effect:
    """Send the real answer in small pieces with pauses between."""

    async def trickle(exchange: Exchange) -> None:
        answer = await exchange.capture()
        await exchange.start(answer.status, answer.headers)
        for start in range(0, len(answer.body), chunk_bytes):
            await exchange.send_body(bytes(answer.body[start : start + chunk_bytes]), more=True)
            await exchange.clock.sleep(delay_s)
        await exchange.send_body(b"", more=False)

    return trickle


def garbage(body: bytes = b'{"half": ') -> Effect:
    """A success whose body is nonsense."""
    return reply(200, body)


def wrong_media_type() -> Effect:
    """The real answer, with the other of the two media types."""

    async def wrong_media_type(exchange: Exchange) -> None:
        answer = await exchange.capture()
        binary = MEDIA_PROTOBUF in answer.headers.get("content-type", "")
        headers = {**answer.headers, "content-type": MEDIA_JSON if binary else MEDIA_PROTOBUF}
        await exchange.answer(answer.status, bytes(answer.body), headers)

    return wrong_media_type


def lost() -> Effect:
    """410: the promise is gone."""
    return reply(410, {"detail": "The request was lost; send it again."})


def duplicate() -> Effect:
    """Deliver the request twice; the client sees the second answer."""

    async def duplicate(exchange: Exchange) -> None:
        await exchange.capture()
        await exchange.forward()

    return duplicate


def duplicate_at_once() -> Effect:
    """Deliver the request twice at the same time; the client sees the first answer."""

    async def duplicate_at_once(exchange: Exchange) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.capture)
            await exchange.forward()

    return duplicate_at_once


def restart() -> Effect:
    """Lose every sample as a restarting server does, then handle the request."""

    async def restart(exchange: Exchange) -> None:
        exchange.server.lose_samples()
        await exchange.forward()

    return restart


def finish_session() -> Effect:
    """End the caller's session, then handle the request."""

    async def finish_session(exchange: Exchange) -> None:
        await exchange.server.finish_session(exchange.request.json.get("session_id"))
        await exchange.forward()

    return finish_session
