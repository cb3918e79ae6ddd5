"""What is known about a request while it is answered, and the middleware that reports it.

The middleware makes one record per request and the handlers fill it in; the log line, the span and
the metrics come from it. A log line never holds a header, a key, a body or a query: only the fields
of `RequestRecord`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from starlette.requests import Request

from tinkex.server.observability.loop_watch import LoopTime, LoopWatch, Watched
from tinkex.spans import otel_tracer
from tinkex.wire.routes import RETRIEVE_FUTURE, RETRIEVE_FUTURES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, MutableMapping

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tinkex.clock import Clock
    from tinkex.server.observability.meters import Meters, Readiness
    from tinkex.server.server_settings import ServerSettings

# Named for what it logs, so that an operator can set its level by itself.
_log = logging.getLogger("tinkex.server.requests")

INTERNAL_SAMPLE = "internal_sample"
"""The route on which nodes compute samples for each other."""
# Held on purpose until there is a result.
_POLLS = frozenset(
    {
        RETRIEVE_FUTURE.name,
        RETRIEVE_FUTURES.name,
        "openai_completions",
        "openai_chat",
        INTERNAL_SAMPLE,
    }
)
# Requested by machines every few seconds; their lines would hide the others.
_PROBES = frozenset({"healthz", "readyz", "metrics"})
_NOT_ANSWERED = 499
_KEY = "tinkex.request"
_HEADERS_KEY = "tinkex.headers"
_SENT_KEY = "tinkex.sent"
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_KEPT_POLLS = 20_000
# Of any one text in a line of the log.
_MOST_LOGGED = 256

current_request_id: ContextVar[str | None] = ContextVar("tinkex_request_id", default=None)
"""The id of the request being answered, for log lines."""


@dataclass(slots=True)
class RequestRecord:
    """One request, without anything secret: no headers, no key, no body."""

    request_id: str
    route: str = "unknown"
    owner: str | None = None
    model_id: str | None = None
    # In a cluster: the node that answers instead of this one, or that passed the request on, and
    # under which epoch this node owns the model.
    passed_to: str | None = None
    passed_by: str | None = None
    epoch: int | None = None
    storage_error: str | None = None
    # The session, and the operation or sampler in it, that a poll waited for.
    polled: tuple[str, str] | None = None
    # What it took: its body as it came and unpacked, its lists and objects, its values of every
    # kind (0 for a body too short to have many); and time on the event loop.
    bytes_in: int = 0
    bytes_decoded: int = 0
    parts: int = 0
    values: int = 0
    loop_time: LoopTime = field(default_factory=LoopTime)


def request_record(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record of the request of an ASGI scope."""
    found = cast("RequestRecord | None", scope.get(_KEY))
    if found is None:
        # An app that is called without its middleware; nothing reads this one.
        found = scope[_KEY] = RequestRecord(_new_id())
    return found


def header_values(scope: MutableMapping[str, Any]) -> dict[bytes, bytes]:
    """The first value of each header, in a dict that is made once per request."""
    found = cast("dict[bytes, bytes] | None", scope.get(_HEADERS_KEY))
    if found is None:
        found = scope[_HEADERS_KEY] = dict(reversed(scope["headers"]))
    return found


def header_value(scope: MutableMapping[str, Any], name: str) -> str:
    """A header of a request, or an empty string."""
    return header_values(scope).get(name.encode(), b"").decode("latin-1")


def keep_sent_body(scope: MutableMapping[str, Any], sent: bytes) -> None:
    """Keep a body as it was received, until the request is answered."""
    scope[_SENT_KEY] = sent


def sent_body(scope: MutableMapping[str, Any]) -> bytes | None:
    """The body as it was received; None if it was not read yet."""
    return cast("bytes | None", scope.get(_SENT_KEY))


def request_id_from(header: bytes | None) -> str:
    """The caller's own id where it is short and plain, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header.decode("ascii")
    return _new_id()


def _new_id() -> str:
    return os.urandom(16).hex()


class Poll(NamedTuple):
    """One request that waited; `target` is the operation or the sampler it asked about."""

    session_id: str
    target: str
    began_at: float
    ended_at: float
    status: int


class Polls:
    """The latest polls of all sessions."""

    def __init__(self, kept: int = _KEPT_POLLS) -> None:
        # Mutable state: the polls, in the order in which they ended.
        self._polls: deque[Poll] = deque(maxlen=kept)

    def add(self, poll: Poll) -> None:
        """Keep one more, and forget the oldest when there are too many."""
        self._polls.append(poll)

    def of(self, session_id: str) -> list[Poll]:
        """Those of one session."""
        return [poll for poll in self._polls if poll.session_id == session_id]


class RequestObserver:
    """Middleware: gives each request an id, and logs, counts and traces it.

    `error_reply` answers an error that no handler caught.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        settings: ServerSettings,
        meters: Meters,
        readiness: Readiness,
        polls: Polls,
        error_reply: Callable[[Request, Exception], Response],
    ) -> None:
        self._app = app
        self._clock = clock
        self._settings = settings
        self._meters = meters
        self._readiness = readiness
        self._polls = polls
        self._error_reply = error_reply
        self._watch = LoopWatch(meters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            with self._watch.running():
                await self._app(scope, receive, send)
            return
        headers = header_values(scope)
        record = scope[_KEY] = RequestRecord(request_id_from(headers.get(b"x-request-id")))
        token = current_request_id.set(record.request_id)
        answer = _Answer(send, record.request_id, self._clock)
        running = Watched(self._run(scope, receive, answer), record.loop_time, self._watch.reading)
        tracer = otel_tracer()
        try:
            if tracer is None:
                await running
            else:
                traceparent = headers.get(b"traceparent")
                with _span(tracer, str(scope["method"]), traceparent, record.request_id) as span:
                    await running
                    _describe(span, record, answer.status)
        finally:
            # A connection that is kept alive keeps the scope of its last request.
            scope.pop(_SENT_KEY, None)
            self._report(scope, record, answer)
            current_request_id.reset(token)

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.status != _NOT_ANSWERED:
                raise  # half an answer was sent; only closing the connection can say that it broke
            reply = self._error_reply(Request(scope), error)
            await reply(scope, receive, answer.send)

    def _report(self, scope: Scope, record: RequestRecord, answer: _Answer) -> None:
        if record.storage_error is not None:
            self._readiness.waits("store", record.storage_error)
        seconds = self._clock.now() - answer.began
        if record.polled is not None:
            at = self._clock.wall()
            self._polls.add(Poll(*record.polled, at - seconds, at, answer.status))
        self._meters.request(record.route, answer.status, seconds)
        self._watch.add(record.route, record.loop_time)
        if record.bytes_in:
            self._meters.received(record.route, record.bytes_in)
        level = logging.DEBUG if record.route in _PROBES else logging.INFO
        title = "request"
        if self._is_slow(record, answer):
            level, title = logging.WARNING, "slow request"
        if not _log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "route": record.route,
            "method": scope["method"],
            "status": answer.status,
            "ms": round(seconds * 1000, 3),
            "owner": None if record.owner is None else owner_hash(record.owner),
            "model_id": record.model_id,
            "passed_to": record.passed_to,
            "passed_by": record.passed_by,
            "epoch": record.epoch,
        }
        fields = {
            name: value[:_MOST_LOGGED] if isinstance(value, str) else value
            for name, value in fields.items()
            if value is not None
        }
        _log.log(level, "%s %s", title, _Shown(fields), extra={"title": title, "fields": fields})

    def _is_slow(self, record: RequestRecord, answer: _Answer) -> bool:
        patience = self._settings.slow_request_s
        if record.route in _POLLS:
            patience += self._settings.long_poll_s
        return answer.first_s is not None and answer.first_s > patience


@dataclass(frozen=True, slots=True)
class _Shown:
    """Fields as text, made only for formatters that know no fields."""

    fields: dict[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.fields.items())


class _Answer:
    """Passes an answer on: notes its status and time, and adds the request's id."""

    def __init__(self, send: Send, request_id: str, clock: Clock) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._now = clock.now
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
    """A short hash that distinguishes owners in a log without naming them."""
    return hashlib.sha256(owner.encode()).hexdigest()[:12]


@contextmanager
def _span(tracer: Any, method: str, traceparent: bytes | None, request_id: str) -> Generator[Any]:
    """A span that is current while the request is answered."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # The client's place in its trace; an unreadable header starts a new trace.
    carrier = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
    with tracer.start_as_current_span(
        "server.request",
        context=TraceContextTextMapPropagator().extract(carrier, Context()),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "tinkex.http_request_id": request_id},
    ) as span:
        yield span


def _describe(span: Any, record: RequestRecord, status: int) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.update_name(f"server.{record.route}")
    span.set_attribute("http.response.status_code", status)
    for name in ("model_id", "passed_to", "passed_by", "epoch"):
        value = getattr(record, name)
        if value is not None:
            span.set_attribute(f"tinkex.{name}", value)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
