"""Middleware around every request: its id, its log line, its metrics, its span.

A log line never holds a header, a key, a body or a query: only what `Seen` names.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import Request

from tinkex.server.api.errors import error_reply
from tinkex.server.observability.seen import (
    Poll,
    Seen,
    current_request_id,
    remember,
    request_id_from,
    request_span,
)
from tinkex.wire.routes import RETRIEVE_FUTURE, RETRIEVE_FUTURES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tinkex.server.api.call import Parts

# The name says what it is, so that an operator can turn it up or down by itself.
_log = logging.getLogger("tinkex.server.requests")

# Held on purpose, until there is something to say.
_POLLS = frozenset(
    {RETRIEVE_FUTURE.name, RETRIEVE_FUTURES.name, "openai_completions", "openai_chat"}
)
# Asked every few seconds by machines; their lines would bury the others.
_PROBES = frozenset({"healthz", "readyz", "metrics"})
_NOT_ANSWERED = 499


class Observed:
    """An ASGI app, watched."""

    def __init__(self, app: ASGIApp, parts: Parts) -> None:
        self._app = app
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        seen = Seen(request_id_from(headers.get("x-request-id")))
        remember(scope, seen)
        token = current_request_id.set(seen.request_id)
        answer = _Answer(send, seen.request_id, self._parts)
        try:
            with request_span(
                str(scope["method"]), headers.get("traceparent"), seen.request_id
            ) as span:
                await self._run(scope, receive, answer)
                span.answered(seen, answer.status)
        finally:
            self._note(scope, seen, answer)
            current_request_id.reset(token)

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.status != _NOT_ANSWERED:
                raise  # half an answer is out; only the connection can say that it broke
            reply = error_reply(Request(scope), error)
            await reply(scope, receive, answer.send)

    def _note(self, scope: Scope, seen: Seen, answer: _Answer) -> None:
        if seen.storage_error is not None:
            self._parts.readiness.waits("store", seen.storage_error)
        seconds = self._parts.clock.now() - answer.began
        if seen.polled is not None:
            at = self._parts.clock.wall()
            self._parts.polls.add(Poll(*seen.polled, at - seconds, at, answer.status))
        self._parts.meters.request(seen.route, answer.status, seconds)
        level = logging.DEBUG if seen.route in _PROBES else logging.INFO
        what = "request"
        if self._is_slow(seen, answer):
            level, what = logging.WARNING, "slow request"
        if not _log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": seen.request_id,
            "route": seen.route,
            "method": scope["method"],
            "status": answer.status,
            "ms": round(seconds * 1000, 3),
            "owner": None if seen.owner is None else owner_hash(seen.owner),
            "model_id": seen.model_id,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        shown = _Shown(fields)
        _log.log(level, "%s %s", what, shown, extra={"title": what, "fields": fields})

    def _is_slow(self, seen: Seen, answer: _Answer) -> bool:
        settings = self._parts.settings
        patience = settings.slow_request_s
        if seen.route in _POLLS:
            patience += settings.long_poll_s
        return answer.first_s is not None and answer.first_s > patience


@dataclass(frozen=True, slots=True)
class _Shown:
    """Fields as text, for formatters that know no fields; ours does without."""

    fields: dict[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.fields.items())


class _Answer:
    """The way out: notes status and time, and adds the request's id."""

    def __init__(self, send: Send, request_id: str, parts: Parts) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._now = parts.clock.now
        # Mutable state: what has been answered so far.
        self.began = self._now()
        self.status = _NOT_ANSWERED
        self.first_s: float | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.first_s = self._now() - self.began
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            message = {**message, "headers": headers}
        await self._send(message)


@lru_cache(maxsize=4096)
def owner_hash(owner: str) -> str:
    """Tells owners apart in a log without naming them."""
    return hashlib.sha256(owner.encode()).hexdigest()[:12]
