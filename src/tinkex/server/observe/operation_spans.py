"""Spans of operations: how long each waited and how long the engine took.

They belong to the trace of the request that brought the operation, which was answered long
before. So the place in that trace is remembered when the operation is accepted, and both spans
are written, with their true times, when it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.spans import otel_tracer

if TYPE_CHECKING:
    from tinkex.server.store.records import Operation, Outcome

# Far more operations than a server has open; beyond it the oldest lose their spans.
_MOST = 50_000


class OperationSpans:
    """Remembers where operations came from. Costs nothing while nobody records spans."""

    def __init__(self) -> None:
        # Mutable state: the contexts of accepted operations, oldest first.
        self._contexts: dict[str, Any] = {}

    def accepted(self, op: Operation) -> None:
        """Remember the span around the caller as the parent of the operation's own."""
        if otel_tracer() is None:
            return
        from opentelemetry.context import get_current

        self._contexts[op.op_id] = get_current()
        if len(self._contexts) > _MOST:
            del self._contexts[next(iter(self._contexts))]

    def ended(self, op: Operation, outcome: Outcome, at: float) -> None:
        """Write both spans, if the operation was accepted under a trace."""
        context = self._contexts.pop(op.op_id, None)
        tracer = otel_tracer()
        if context is None or tracer is None:
            return
        started = op.started_at
        _write(tracer, context, op, "queue", op.created_at, at if started is None else started)
        if started is not None:
            _write(tracer, context, op, "compute", started, at, outcome.error)


def _write(
    tracer: Any,
    context: Any,
    op: Operation,
    phase: str,
    begin: float,
    end: float,
    error: str | None = None,
) -> None:
    from opentelemetry.trace import Status, StatusCode

    ids = {"request_id": op.op_id, "model_id": op.model_id, "sampler_id": op.sampler_id}
    attributes = {f"tinkex.{name}": value for name, value in ids.items() if value is not None}
    span = tracer.start_span(
        f"{op.kind} {phase}", context=context, start_time=_ns(begin), attributes=attributes
    )
    if error is not None:
        # Not the text: it may quote what a user sent.
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_time=_ns(max(begin, end)))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
