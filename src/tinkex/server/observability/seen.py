"""What is known about the request being answered; the log line, span and metrics say it.

Middleware makes one per request and the handler fills in what it learns. The request id is
also found by whatever logs while the request is answered.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tinkex.spans import otel_tracer

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping

_KEY = "tinkex.seen"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_UNKNOWN = "unknown"


@dataclass(slots=True)
class Seen:
    """One request, without anything secret: no headers, no key, no body."""

    request_id: str
    route: str = _UNKNOWN
    owner: str | None = None
    model_id: str | None = None
    storage_error: str | None = None
    # The session, and the operation or sampler in it, that a poll waited for.
    polled: tuple[str, str] | None = None


def request_id_from(header: str | None) -> str:
    """The caller's own id where it is short and plain, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return uuid.uuid4().hex


def seen_by(scope: MutableMapping[str, Any]) -> Seen:
    """What is known about the request of an ASGI scope."""
    found = cast("Seen | None", scope.get(_KEY))
    if found is None:
        # An app that was called without its middleware; nobody will read this.
        found = scope[_KEY] = Seen(uuid.uuid4().hex)
    return found


def remember(scope: MutableMapping[str, Any], seen: Seen) -> None:
    """Let `seen_by` find it."""
    scope[_KEY] = seen


current_request_id: ContextVar[str | None] = ContextVar("tinkex_request_id", default=None)
"""The id of the request being answered, for log lines."""


class RequestSpan:
    """What the middleware tells about the answer; does nothing while nobody records."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def answered(self, seen: Seen, status: int) -> None:
        """Name the span and say how it ended."""
        if self._span is None:
            return
        self._span.update_name(f"server.{seen.route}")
        self._span.set_attribute("http.response.status_code", status)
        if seen.model_id is not None:
            self._span.set_attribute("tinkex.model_id", seen.model_id)
        if status >= 500:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR))


@contextmanager
def request_span(method: str, traceparent: str | None, request_id: str) -> Generator[RequestSpan]:
    """A span that is current while the request is answered."""
    tracer = otel_tracer()
    if tracer is None:
        yield RequestSpan()
        return
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        "server.request",
        context=_remote(traceparent),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "tinkex.http_request_id": request_id},
    ) as span:
        yield RequestSpan(span)


def _remote(traceparent: str | None) -> Any:
    """The client's place in its trace; an unreadable header starts a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if traceparent is None else {"traceparent": traceparent}
    return TraceContextTextMapPropagator().extract(carrier, Context())


_KEPT = 20_000


class Poll(NamedTuple):
    """One request that waited; `target` is the operation or the sampler it asked about."""

    session_id: str
    target: str
    began_at: float
    ended_at: float
    status: int


class Polls:
    """The latest polls of all sessions."""

    def __init__(self, kept: int = _KEPT) -> None:
        # Mutable state: the polls, in the order in which they ended.
        self._polls: deque[Poll] = deque(maxlen=kept)

    def add(self, poll: Poll) -> None:
        """Keep one more, and forget the oldest when there are too many."""
        self._polls.append(poll)

    def of(self, session_id: str) -> list[Poll]:
        """Those of one session."""
        return [poll for poll in self._polls if poll.session_id == session_id]
