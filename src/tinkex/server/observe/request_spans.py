"""One span per request, below the client's own where it sent a `traceparent`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinkex.spans import otel_tracer

if TYPE_CHECKING:
    from collections.abc import Generator

    from tinkex.server.observe.seen import Seen


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
