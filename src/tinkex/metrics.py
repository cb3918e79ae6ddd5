"""Numbers about what a client does: requests, retries, waits, tokens, latencies, failures.

    from tinkex import metrics

    stop = metrics.subscribe(lambda one: print(one.metric.name, one.value, one.labels))

They go to subscribers, and to OpenTelemetry once the program has set up a meter provider; this
module never imports OpenTelemetry by itself. `METRICS` defines all of them. Labels are words from
small fixed sets, never ids and never text. Latencies come from spans. Without a subscriber or
provider a measurement costs one test of `meter.on`.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tinkex.errors import code_of
from tinkex.spans import Listeners, current_span
from tinkex.spans import subscribe as subscribe_to_spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.spans import Span
    from tinkex.types import Usage

    Listener = Callable[["Measurement"], None]

WaitReason = Literal["slot", "bytes", "rate_limit", "capacity", "billing", "backoff"]
"""What a client waits for: a place among the samples under way, room in a byte budget, the end of
a rate limit, room on the server, an account that can pay, or the next attempt."""

WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that a client reports; `unit` is spelled as OpenTelemetry does."""

    name: str
    kind: Literal["counter", "histogram"]
    unit: str
    labels: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One event of a metric: a counter's increase, or a histogram's value."""

    metric: Metric
    value: float
    labels: dict[str, str]


REQUESTS = Metric(
    "tinkex.client.requests",
    "counter",
    "{request}",
    ("route", "status"),
    "HTTP requests that ended, retries included; the status is `connection` or `timeout` where "
    "there was no answer",
)
RETRIES = Metric(
    "tinkex.client.retries",
    "counter",
    "{retry}",
    ("route", "reason"),
    "requests that were sent again, because of `rate_limit`, `billing` or `backoff`",
)
WAIT = Metric(
    "tinkex.client.wait.duration",
    "histogram",
    "s",
    ("reason",),
    "waits of a millisecond and more, by what was waited for",
)
TOKENS = Metric(
    "tinkex.client.tokens",
    "counter",
    "{token}",
    ("kind",),
    "tokens of finished calls: `prompt`, `cached` (those of them that cost nothing), `generated`, "
    "`trained`",
)
SUBMIT = Metric(
    "tinkex.client.submit.duration",
    "histogram",
    "s",
    ("operation",),
    "from a call's turn until the server has accepted it",
)
QUEUE = Metric(
    "tinkex.client.queue.duration",
    "histogram",
    "s",
    ("operation",),
    "time in the server's queue, where the server says so",
)
RESULT = Metric(
    "tinkex.client.result.duration",
    "histogram",
    "s",
    ("operation",),
    "from acceptance until the result is here",
)
FAILURES = Metric(
    "tinkex.client.failures",
    "counter",
    "{failure}",
    ("code",),
    "calls that ended with an error, by the error's `code`; `other` for errors that are not "
    "tinkex's own",
)

METRICS = (REQUESTS, RETRIES, WAIT, TOKENS, SUBMIT, QUEUE, RESULT, FAILURES)

# From a millisecond, a local server's answer, to the ten minutes of a long queue.
_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0),
    *(120.0, 300.0, 600.0),
)
_SHORTEST_WAIT_S = 0.001
_OF_SPANS = {
    "training.submit": SUBMIT,
    "sampling.submit": SUBMIT,
    "training.wait": RESULT,
    "sampling.wait": RESULT,
}
_OPERATIONS = ("training", "sampling")


def subscribe(listener: Listener) -> Callable[[], None]:
    """Have `listener` called with every measurement, in the thread that makes it.

    Returns what ends the subscription. A listener must be quick. If it raises, that is logged and
    the call continues.
    """
    return meter.subscribe(listener)


class Meter:
    """Where the measurements of this process go. Ask for `on` before calling anything else."""

    def __init__(self) -> None:
        # Mutable state: the listeners, the provider of OpenTelemetry with its instruments, and
        # what ends the subscription to spans.
        self.on = False
        self._lock = threading.Lock()
        self._listeners: Listeners[Measurement] = Listeners()
        self._provider: Any = None
        self._instruments: dict[str, Callable[[float, dict[str, str]], None]] = {}
        self._stop_spans: Callable[[], None] | None = None

    # -- subscribers --------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """As the function of this module."""
        stop = self._listeners.add(listener)
        self._switch()

        def end() -> None:
            stop()
            self._switch()

        return end

    def find_opentelemetry(self) -> None:
        """Use the program's meter provider, if there is one by now."""
        api = sys.modules.get("opentelemetry.metrics")
        if api is None:
            return
        provider = api.get_meter_provider()
        # The proxy stands for a provider that is not set up yet.
        found = None if type(provider).__name__ == "_ProxyMeterProvider" else provider
        with self._lock:
            changed = found is not self._provider
            if changed:
                self._provider = found
                self._instruments = {} if found is None else _instruments(found)
        if changed:
            self._switch()

    def _switch(self) -> None:
        # Read and write in one step: the last of several callers sees what all of them changed.
        with self._lock:
            self.on = bool(self._listeners.all or self._instruments)
            if self.on and self._stop_spans is None:
                self._stop_spans = subscribe_to_spans(self._span_ended)
            elif not self.on and self._stop_spans is not None:
                self._stop_spans()
                self._stop_spans = None

    # -- what is recorded ---------------------------------------------------------------------

    def request(self, route: str, status: int | Literal["connection", "timeout"]) -> None:
        """An HTTP request has ended."""
        self._record(REQUESTS, 1, route=route, status=str(status))

    def retry(self, route: str, reason: WaitReason, wait_s: float | None = None) -> None:
        """A request will be sent again; `wait_s` is a wait that is not recorded elsewhere."""
        self._record(RETRIES, 1, route=route, reason=reason)
        if wait_s is not None:
            self.wait(reason, wait_s)

    def wait(self, reason: WaitReason, seconds: float) -> None:
        """Something has waited; less than a millisecond is no wait."""
        if seconds >= _SHORTEST_WAIT_S:
            self._record(WAIT, seconds, reason=reason)

    def usage(self, usage: Usage) -> None:
        """A call has ended well; its span is the current one, or around it."""
        tokens = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "generated": usage.generated_tokens,
            "trained": usage.trained_tokens,
        }
        for kind, count in tokens.items():
            if count:
                self._record(TOKENS, count, kind=kind)
        if usage.queue_s is not None:
            self._record(QUEUE, usage.queue_s, operation=_operation(current_span()))

    def failed(self, error: BaseException) -> None:
        """A call has ended with an error."""
        self._record(FAILURES, 1, code=code_of(error))

    def _span_ended(self, span: Span) -> None:
        metric = _OF_SPANS.get(span.name)
        if metric is not None and span.error is None and span.duration_s is not None:
            self._record(metric, span.duration_s, operation=_operation(span.parent))

    def _record(self, metric: Metric, value: float, **labels: str) -> None:
        instrument = self._instruments.get(metric.name)
        if instrument is not None:
            instrument(value, labels)
        if self._listeners.all:
            self._listeners.notify(Measurement(metric, value, labels), metric.name)


meter = Meter()
"""The meter of this process."""


def _operation(span: Span | None) -> str:
    """What a span is a part of, such as `forward_backward`."""
    while span is not None:
        area, _, name = span.name.partition(".")
        if area in _OPERATIONS and span.name not in _OF_SPANS:
            return name
        span = span.parent
    return "other"


def _instruments(provider: Any) -> dict[str, Callable[[float, dict[str, str]], None]]:
    source = provider.get_meter("tinkex")
    return {metric.name: _instrument(source, metric) for metric in METRICS}


def _instrument(source: Any, metric: Metric) -> Callable[[float, dict[str, str]], None]:
    about = {"unit": metric.unit, "description": metric.meaning}
    if metric.kind == "counter":
        return source.create_counter(metric.name, **about).add
    try:
        buckets = {"explicit_bucket_boundaries_advisory": _BUCKETS_S}
        return source.create_histogram(metric.name, **about, **buckets).record
    except TypeError:  # versions that cannot be advised
        return source.create_histogram(metric.name, **about).record
