"""The metrics behind `/metrics`, in a registry of their own, and whether the server is ready.

Each part of the server counts its events here by a plain call. Values that can be read at any
moment (queue lengths, the engine's gauges) are not counted but read for each scrape.
docs/reference/metrics.md lists every name; a test compares.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tinkex.engine.protocol import GAUGES
from tinkex.spans import otel_tracer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.server.store.records import Operation, OperationOutcome

# A long poll is held for half a minute; a step of a large model may take some.
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Far more operations than a server has open; beyond this number the oldest lose their spans.
_MOST = 50_000


class Meters:
    """Counts what a server does. Used from its one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Mutable state: the metrics, and which operations' spans are still open.
        self._spans = OperationSpans()
        self._requests = self._counter(
            "requests", "HTTP requests by route and status.", "route status"
        )
        self._latency = self._histogram(
            "request_seconds", "Time from a request to its last byte.", "route", _LATENCY_S
        )
        self._operations = self._counter(
            "operations", "Operations that ended, by kind and outcome.", "kind outcome"
        )
        self._tokens = self._counter("tokens", "Tokens by what was done with them.", "kind")
        self._queued = self._histogram(
            "queue_seconds", "Time an operation waited for its turn.", "kind", _STEP_S
        )
        self._steps = self._histogram(
            "step_seconds", "Time an operation took in the engine.", "kind", _STEP_S
        )
        self._restarts = self._counter("engine_restarts", "Engine processes started again.", "")
        self._waiting = self._gauge("queue_length", "Operations waiting for their turn.", "kind")
        self._state = {
            name: self._gauge(name, text, "")
            for name, text in (
                ("samples_in_flight", "Samples accepted and not finished."),
                ("sessions_active", "Sessions that take new work."),
                ("journal_bytes", "Bodies that a crash would run again."),
                ("ready", "1 when /readyz answers 200."),
            )
        }
        self._engine = {
            name: self._gauge(f"engine_{name}", "The engine's own figure; see the docs.", "")
            for name in GAUGES
        }

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def accepted(self, op: Operation) -> None:
        """Note a new operation; called while the request that submitted it is answered."""
        self._spans.accepted(op)

    def ended(self, op: Operation, outcome: OperationOutcome, at: float) -> None:
        """Count an operation that has its outcome; `op` knows when it started, `at` is now."""
        kind = op.kind
        failed = outcome.error is not None
        self._operations.labels(kind, f"error_{outcome.category}" if failed else "ok").inc()
        usage = outcome.usage
        for name, amount in (
            ("trained", usage.trained_tokens),
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.generated_tokens),
        ):
            if amount:
                self._tokens.labels(name).inc(amount)
        started = op.started_at
        self._queued.labels(kind).observe(
            max((at if started is None else started) - op.created_at, 0)
        )
        if started is not None:
            self._steps.labels(kind).observe(max(at - started, 0))
        self._spans.ended(op, outcome, at)

    def engine_restarted(self) -> None:
        """Count a start of the engine's process after the first."""
        self._restarts.inc()

    def show(
        self,
        *,
        queues: Mapping[str, int] | None = None,
        engine: Mapping[str, float] | None = None,
        **state: float,
    ) -> None:
        """Set values that were just read; what is left out keeps its last value."""
        if queues is not None:
            self._waiting.clear()
            for kind, length in queues.items():
                self._waiting.labels(kind).set(length)
        if engine is not None:
            # An engine that does not answer has no figures; the old ones would be wrong.
            for name, gauge in self._engine.items():
                gauge.set(engine.get(name, nan))
        for name, value in state.items():
            self._state[name].set(value)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: str) -> Counter:
        return Counter(f"tinkex_{name}", text, labels.split(), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: str) -> Gauge:
        return Gauge(f"tinkex_{name}", text, labels.split(), registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(
            f"tinkex_{name}", text, labels.split(), registry=self.registry, buckets=buckets
        )


class OperationSpans:
    """Remembers the trace context of operations. Costs nothing while no tracer records spans."""

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

    def ended(self, op: Operation, outcome: OperationOutcome, at: float) -> None:
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


class Readiness:
    """Reasons why the server is not ready, one per part; `/readyz` repeats them.

    A server that is not ready still answers: requests are accepted and wait, unless the store
    itself fails.
    """

    def __init__(self) -> None:
        # Mutable state: what each part waits for; a part that is well is not in here.
        self._reasons: dict[str, str] = {}

    def waits(self, part: str, reason: str) -> None:
        """A part such as "engine" or "store" cannot work now."""
        self._reasons[part] = reason

    def ready(self, part: str) -> None:
        """A part works."""
        self._reasons.pop(part, None)

    @property
    def reasons(self) -> dict[str, str]:
        """What each part that is not ready waits for."""
        return dict(self._reasons)
