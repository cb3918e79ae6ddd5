"""The metrics behind `/metrics`, in a registry of their own, and whether the server is ready.

Each part of the server counts its events here by a plain call. Values that can be read at any
moment (queue lengths, the engine's gauges) are not counted but read for each scrape.
docs/reference/metrics.md lists every name; a test compares.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tinkex.engine.protocol import GAUGES
from tinkex.spans import otel_tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from tinkex.server.store.records import Operation, OperationOutcome

M = TypeVar("M", Counter, Histogram)

# A long poll is held for half a minute; a step of a large model may take some.
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Far more operations than a server has open; beyond this number the oldest lose their spans.
_MOST = 50_000


class Meters:
    """Counts what a server does. Used from its one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Mutable state: the metrics, which operations' spans are still open, the longest steps, and
        # metrics by their labels.
        self._spans = OperationSpans()
        self._longest: dict[str, float] = {}
        self._children: dict[tuple[Any, ...], Any] = {}
        self._requests = self._counter(
            "requests", "HTTP requests by route and status.", "route status"
        )
        self._latency = self._histogram(
            "request_seconds", "Time from a request to its last byte.", "route", _LATENCY_S
        )
        self._received = self._counter("request_bytes", "Bytes of bodies by route.", "route")
        self._loop_blocks = self._counter(
            "loop_blocks", "Requests with a step above 100 ms on the event loop.", "route"
        )
        self._loop_longest = self._gauge(
            "loop_longest_cpu_seconds", "CPU time of the longest step on the event loop.", "route"
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
        self._connections = ConnectionFigures()
        self.registry.register(self._connections)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._child(self._requests, route, status).inc()
        self._child(self._latency, route).observe(seconds)

    def received(self, route: str, size_bytes: int) -> None:
        """Count the body of a request, as it came."""
        self._child(self._received, route).inc(size_bytes)

    def loop_step(self, route: str, cpu_s: float, *, blocked: bool) -> None:
        """Note the longest step of a request on the event loop."""
        if blocked:
            self._loop_blocks.labels(route).inc()
        if cpu_s > self._longest.get(route, 0.0):
            self._longest[route] = cpu_s
            self._loop_longest.labels(route).set(cpu_s)

    def accepted(self, op: Operation) -> None:
        """Note a new operation; called while the request that submitted it is answered."""
        self._spans.accepted(op)

    def ended(self, op: Operation, outcome: OperationOutcome, at: float) -> None:
        """Count an operation that has its outcome; `op` knows when it started, `at` is now."""
        kind = op.kind
        if outcome.error is not None:
            self._operations.labels(kind, f"error_{outcome.category}").inc()
        else:
            self._child(self._operations, kind, "ok").inc()
        usage = outcome.usage
        for name, amount in (
            ("trained", usage.trained_tokens),
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.generated_tokens),
        ):
            if amount:
                self._child(self._tokens, name).inc(amount)
        started = op.started_at
        self._child(self._queued, kind).observe(
            max((at if started is None else started) - op.created_at, 0)
        )
        if started is not None:
            self._child(self._steps, kind).observe(max(at - started, 0))
        self._spans.ended(op, outcome, at)

    def engine_restarted(self) -> None:
        """Count a start of the engine's process after the first."""
        self._restarts.inc()

    def watch_connections(self, read: Callable[[], tuple[int, Mapping[str, int]]]) -> None:
        """Show what `read` returns: open connections, and how many were refused by reason."""
        self._connections.read = read

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

    def _child(self, metric: M, *labels: str | int) -> M:
        """What `metric.labels` returns, found in less time than it takes to count."""
        found: Any = self._children.get((metric, labels))
        if found is None:
            found = self._children[metric, labels] = metric.labels(*labels)
        return found

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


class ConnectionFigures(Collector):
    """Connections, as the HTTP server counts them; none without one."""

    def __init__(self) -> None:
        self.read: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {})

    def collect(self) -> Iterator[Metric]:
        """Read for each scrape."""
        opened, refused = self.read()
        yield GaugeMetricFamily("tinkex_connections_open", "Open connections.", opened)
        counted = CounterMetricFamily(
            "tinkex_connections_refused", "Connections refused or cut off.", labels=["reason"]
        )
        for reason, count in refused.items():
            counted.add_metric([reason], count)
        yield counted


class Readiness:
    """Reasons why the server is not ready, one per part; `/readyz` repeats them.

    A server that is not ready still answers: requests are accepted and wait, unless the store
    itself fails.
    """

    def __init__(self) -> None:
        # Mutable state: what each part waits for; a part that is well is not in here. What to call
        # when a part has failed for good.
        self._reasons: dict[str, str] = {}
        self.on_failure: Callable[[str], None] = lambda _: None

    def waits(self, part: str, reason: str) -> None:
        """A part such as "engine" or "store" cannot work now."""
        self._reasons[part] = reason

    def fails(self, part: str, reason: str) -> None:
        """A part such as "worker" has ended and only a restart of the process helps."""
        self.waits(part, reason)
        self.on_failure(reason)

    def ready(self, part: str) -> None:
        """A part works."""
        self._reasons.pop(part, None)

    @property
    def reasons(self) -> dict[str, str]:
        """What each part that is not ready waits for."""
        return dict(self._reasons)
