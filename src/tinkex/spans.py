"""Spans: one helper around every step worth knowing about.

    with span("training.submit", model_id=model_id, seq_id=7):
        ...

A span records a name from a small fixed set, ids as data, start, duration and failure. It works
in blocking and in async code: the current span lives in a context variable, so it follows tasks
and everything that is started with a copied context. Spans go to listeners in this process
(`subscribe`), to the DEBUG log, and to OpenTelemetry once the program has set up a tracer
provider; without any of them a span costs next to nothing. This module never imports
OpenTelemetry by itself.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import nullcontext
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from types import TracebackType

    Id = str | int | float | bool | None

T = TypeVar("T")

_log = logging.getLogger(__name__)
# In `sys.modules` when the program uses it; a provider cannot be set without it.
_OTEL = "opentelemetry.trace"


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
        _listeners.notify(self, self.name)

    def __repr__(self) -> str:
        return f"Span({self.name!r}, {self.ids!r})"


def span(name: str, /, **ids: Id) -> Span:
    """A step to run under `with`; `name` is one of few, everything that varies is an id.

    Never pass keys, headers or prompts: ids are logged and leave the process.
    """
    if _listeners.all or sys.modules.get(_OTEL) or _log.isEnabledFor(logging.DEBUG):
        return Span(name, ids)
    return _UNHEARD


class _Unheard(nullcontext["Span"], Span):
    """Stands for every span that has no listener, so that a sample does not pay for its spans."""

    def __init__(self) -> None:
        nullcontext.__init__(self, self)  # pyright: ignore[reportUnknownMemberType]
        Span.__init__(self, "unheard", {})

    def note(self, **ids: Id) -> None: ...


def current_span() -> Span | None:
    """The innermost span around the caller, or None; also None where spans have no listener."""
    return _current.get()


def current_traceparent() -> str | None:
    """The W3C `traceparent` header value of OpenTelemetry's current span, or None.

    None unless that span is being recorded, or was left out by a sampler, which the server should
    know, too. A span that has ended is no parent for what a background task sends later.
    """
    trace: Any = sys.modules.get(_OTEL)
    if trace is None:
        return None
    here = trace.get_current_span()
    context = here.get_span_context()
    if not context.is_valid or (context.trace_flags.sampled and not here.is_recording()):
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def subscribe(listener: Callable[[Span], None]) -> Callable[[], None]:
    """Have `listener` called with every span that ends, in the thread where it ends.

    Returns what ends the subscription. A listener must be quick. If it raises, that is logged and
    the step continues.
    """
    return _listeners.add(listener)


class Listeners(Generic[T]):
    """The subscribers of this process to one kind of event."""

    def __init__(self) -> None:
        # Mutable state: a tuple that is replaced, never edited, so that readers need no lock.
        self.all: tuple[Callable[[T], None], ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: Callable[[T], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on; returns what ends that."""
        with self._lock:
            self.all = (*self.all, listener)
        return lambda: self._remove(listener)

    def _remove(self, listener: Callable[[T], None]) -> None:
        with self._lock:
            kept = list(self.all)
            if listener in kept:
                kept.remove(listener)
            self.all = tuple(kept)

    def notify(self, event: T, name: str) -> None:
        """Call every listener; one that raises is logged, and the step continues."""
        for listener in self.all:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - a listener is not part of the step
                _log.warning("a listener failed on %s", name, exc_info=True)


class _OtelSpan:
    """The OpenTelemetry counterpart of a span, current while the span is."""

    def __init__(self, tracer: Any, source: Span) -> None:
        # Never the text of an error, which may quote a prompt; its type is enough.
        self._scope = tracer.start_as_current_span(
            source.name,
            attributes=_attributes(source.ids),
            record_exception=False,
            set_status_on_exception=False,
        )
        self._span = self._scope.__enter__()

    def set_attributes(self, attributes: dict[str, str | int | float | bool]) -> None:
        self._span.set_attributes(attributes)

    def end(self, *outcome: Any) -> None:
        if isinstance(outcome[1], Exception):
            trace: Any = sys.modules.get(_OTEL)
            self._span.set_attribute("error.type", type(outcome[1]).__name__)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        try:
            self._scope.__exit__(*outcome)
        except BaseException as error:
            # A scope built from a generator raises the block's own error again.
            if error is not outcome[1]:
                raise


def otel_tracer() -> Any:
    """A tracer once the program has set up OpenTelemetry, else None."""
    trace: Any = sys.modules.get(_OTEL)
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    # The proxy stands for a provider that is not set up yet; it would record nothing.
    return None if type(provider) is trace.ProxyTracerProvider else provider.get_tracer("tinkex")


def _attributes(ids: dict[str, Id]) -> dict[str, str | int | float | bool]:
    return {f"tinkex.{name}": value for name, value in ids.items() if value is not None}


def _readable(ids: dict[str, Id]) -> str:
    return "".join(f" {name}={value}" for name, value in ids.items() if value is not None)


_current: ContextVar[Span | None] = ContextVar("tinkex_span", default=None)
_listeners: Listeners[Span] = Listeners()
_UNHEARD = _Unheard()
