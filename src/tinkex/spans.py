"""Spans: one helper around every step worth knowing about.

    with span("training.submit", model_id=model_id, seq_id=7):
        ...

A span records a name from a small fixed set, ids as data, start, duration and failure. It works
in blocking and in async code: the current span lives in a context variable, so it follows tasks
and whatever is started with a copied context. Nobody has to listen, and then it costs next to
nothing. Those who can: listeners in this process (`subscribe`), the DEBUG log, and OpenTelemetry
once the program has set up a tracer provider. This module never imports OpenTelemetry by itself.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from types import TracebackType

    Id = str | int | float | bool | None
    Listener = Callable[["Span"], None]

_log = logging.getLogger(__name__)


class Span:
    """One step. Made by `span`; complete when its `with` block has ended.

    `error` is what the block raised, `duration_s` is None while it runs.
    """

    __slots__ = (
        "_otel",
        "_started_s",
        "_token",
        "duration_s",
        "error",
        "ids",
        "name",
        "parent",
    )

    def __init__(self, name: str, ids: dict[str, Id]) -> None:
        self.name = name
        self.ids = ids
        self.parent: Span | None = None
        self.error: BaseException | None = None
        self.duration_s: float | None = None
        self._otel: _OtelSpan | None = None

    def note(self, **ids: Id) -> None:
        """Add ids that became known on the way, such as a request id."""
        self.ids.update(ids)
        if self._otel is not None:
            self._otel.set_attributes(_attributes(ids))

    def __enter__(self) -> Span:
        self.parent = _current.get()
        self._token: Token[Span | None] = _current.set(self)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s started%s", self.name, _readable(self.ids))
        tracer = otel_tracer()
        if tracer is not None:
            self._otel = _OtelSpan(tracer, self)
        self._started_s = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.duration_s = perf_counter() - self._started_s
        self.error = error
        try:
            _current.reset(self._token)
        except ValueError:
            # Ended in another context than it began in, as a generator's clean-up may.
            _current.set(self.parent)
        if self._otel is not None:
            self._otel.end(kind, error, traceback)
        if _log.isEnabledFor(logging.DEBUG):
            outcome = "ended" if kind is None else f"failed ({kind.__name__})"
            _log.debug(
                "%s %s after %.6f s%s", self.name, outcome, self.duration_s, _readable(self.ids)
            )
        for listener in _listeners.all:
            _tell(listener, self)

    def __repr__(self) -> str:
        return f"Span({self.name!r}, {self.ids!r})"


def span(name: str, /, **ids: Id) -> Span:
    """A step to run under `with`; `name` is one of few, everything that varies is an id.

    Never pass keys, headers or prompts: ids are logged and leave the process.
    """
    if not _listeners.all and _otel_trace() is None and not _log.isEnabledFor(logging.DEBUG):
        return _UNHEARD
    return Span(name, ids)


class _Unheard(Span):
    """Stands for every span while nobody listens: a sample must not pay for what nobody reads."""

    def note(self, **ids: Id) -> None: ...

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *outcome: object) -> None: ...


def current_span() -> Span | None:
    """The innermost span around the caller, or None; also None while nobody listens."""
    return _current.get()


def current_traceparent() -> str | None:
    """The W3C `traceparent` header value of OpenTelemetry's current span, or None.

    None unless that span is being recorded, or was left out by a sampler, which the server should
    know, too. A span that has ended is no parent for what a background task sends later.
    """
    trace = _otel_trace()
    if trace is None:
        return None
    here = trace.get_current_span()
    context = here.get_span_context()
    if not context.is_valid or (context.trace_flags.sampled and not here.is_recording()):
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def subscribe(listener: Listener) -> Callable[[], None]:
    """Have `listener` called with every span that ends, in the thread where it ends.

    Returns what ends the subscription. A listener must be quick; if it raises, that is logged
    and the step goes on.
    """
    return _listeners.add(listener)


class _Listeners:
    """Who listens in this process."""

    def __init__(self) -> None:
        # Mutable state: a tuple that is replaced, never edited, so that readers need no lock.
        self.all: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: Listener) -> Callable[[], None]:
        with self._lock:
            self.all = (*self.all, listener)
        return lambda: self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with self._lock:
            kept = list(self.all)
            if listener in kept:
                kept.remove(listener)
            self.all = tuple(kept)


class _OtelSpan:
    """The OpenTelemetry twin of a span, current while the span is."""

    def __init__(self, tracer: Any, ours: Span) -> None:
        # Never the text of an error, which may quote a prompt; its type is enough.
        self._scope = tracer.start_as_current_span(
            ours.name,
            attributes=_attributes(ours.ids),
            record_exception=False,
            set_status_on_exception=False,
        )
        self._span = self._scope.__enter__()

    def set_attributes(self, attributes: dict[str, str | int | float | bool]) -> None:
        self._span.set_attributes(attributes)

    def end(self, *outcome: Any) -> None:
        if isinstance(outcome[1], Exception):
            trace = _otel_trace()
            self._span.set_attribute("error.type", type(outcome[1]).__name__)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        try:
            self._scope.__exit__(*outcome)
        except BaseException as error:
            # A scope built from a generator hands the block's own error back; it is on its way.
            if error is not outcome[1]:
                raise


def _otel_trace() -> Any:
    """`opentelemetry.trace` when the program uses it; a provider cannot be set without it."""
    return sys.modules.get("opentelemetry.trace")


def otel_tracer() -> Any:
    """A tracer once the program has set up OpenTelemetry, else None."""
    trace = _otel_trace()
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    # The proxy stands for "nobody has set up a provider yet"; it would record nothing.
    return None if type(provider) is trace.ProxyTracerProvider else provider.get_tracer("tinkex")


def _attributes(ids: dict[str, Id]) -> dict[str, str | int | float | bool]:
    return {f"tinkex.{name}": value for name, value in ids.items() if value is not None}


def _readable(ids: dict[str, Id]) -> str:
    return "".join(f" {name}={value}" for name, value in ids.items() if value is not None)


def _tell(listener: Listener, ended: Span) -> None:
    try:
        listener(ended)
    except Exception:  # noqa: BLE001 - a listener is not part of the step
        _log.warning("a listener failed on span %s", ended.name, exc_info=True)


_current: ContextVar[Span | None] = ContextVar("tinkex_span", default=None)
_listeners = _Listeners()
_UNHEARD = _Unheard("unheard", {})
