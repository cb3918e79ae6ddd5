"""Telemetry: events about sessions and errors, sent to the server in the background.

Recording an event puts it into a bounded queue and returns, from any thread; a loop on the
client's own event loop sends what is queued. Nothing here blocks, raises into its caller or
delays an error: a dead telemetry route loses events, which are counted. `redaction` decides what
events may contain, `at_exit` what happens when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
import weakref
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.clock import time_limit
from tinkex.errors import ClosedError, NotFoundError, TinkerError
from tinkex.telemetry import at_exit
from tinkex.telemetry.redaction import Redactor, chain, is_user_error
from tinkex.types import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tinkex.clock import Clock
    from tinkex.telemetry.redaction import EventName
    from tinkex.transport.api import Api
    from tinkex.types import Severity, TelemetryEvent

_log = logging.getLogger(__name__)
_BATCH = 100
_QUEUE = 10_000
_EVERY_S = 10.0
_ATTEMPTS = 3
_NAMES: frozenset[EventName] = frozenset({"queue_state_changed", "user_error"})
_FLUSH_S = 2.0
# The severities of errors that reached the user.
_URGENT = ("WARNING", "ERROR")
# The number of errors that are remembered, so that one is not reported twice.
_REMEMBERED = 32


# What the sending loop is notified of.
_NOTHING, _LATER, _SOON = 0, 1, 2


class _Signals:
    """How the sending loop is woken: something is queued, and whether to send it at once."""

    def __init__(self) -> None:
        self.queued = asyncio.Event()
        self.soon = asyncio.Event()

    def notify(self, news: int) -> None:
        self.queued.set()
        if news == _SOON:
            self.soon.set()

    def clear(self) -> None:
        self.queued.clear()
        self.soon.clear()


class Telemetry:
    """The events of one connection set.

    `api` gives the api once there is one, `post` runs an action on the loop, `secrets` has the
    credentials that must never be in an event. Without a `session_id` the events count as those
    of a connection without a session.
    """

    def __init__(
        self,
        api: Callable[[], Api],
        clock: Clock,
        post: Callable[[Callable[[], object]], None],
        *,
        session_id: str | None = None,
        secrets: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        # Mutable state: the queue, the batch under way, the counters and the errors reported last,
        # behind one lock that is held briefly; the sending loop, its signals, and what it was
        # notified of since it last sent; whether the server has said that it takes no telemetry.
        self.session_id = session_id
        self.dropped = 0
        self._api = api
        self._clock = clock
        self._post = post
        self._redactor = Redactor(secrets)
        # Re-entrant: a signal handler may record while its own thread is recording.
        self._lock = threading.RLock()
        self._sent = threading.Condition(self._lock)
        self._queue: deque[TelemetryEvent] = deque()
        self._sending: list[TelemetryEvent] = []
        self._next_index = 0
        self._reported: deque[weakref.ref[BaseException]] = deque(maxlen=_REMEMBERED)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals: _Signals | None = None
        self._notified = _NOTHING
        self._refused = False
        self._started_s = clock.now()
        self._pid = os.getpid()
        self._sessionless_id = f"sessionless-{uuid.uuid4()}"

    # -- recording, from any thread -----------------------------------------------------------

    def event(
        self, name: EventName, data: Mapping[str, Any] | None = None, severity: Severity = "INFO"
    ) -> None:
        """Record that something happened; of `data` only ids and known words are taken."""
        known = name if name in _NAMES else "other"
        self._record(
            GenericEvent,
            severity,
            lambda: {"event_name": known, "event_data": self._redactor.members(data or {})},
        )

    def exception(self, error: BaseException) -> None:
        """Record an error that reached the user, once, and send it soon."""
        if not isinstance(error, Exception) or isinstance(error, ClosedError):
            # Interrupts, cancellations and closing are how programs end.
            return
        try:
            if not self._usable() or self._known(error):
                return
            users = is_user_error(error)
        except Exception:  # noqa: BLE001 - a user's error class may misbehave
            _log.debug("an error could not be looked at", exc_info=True)
            return
        if users:
            self._record(GenericEvent, "WARNING", lambda: self._user_error(error), urgent=True)
        else:
            self._record(UnhandledExceptionEvent, "ERROR", lambda: self._bug(error), urgent=True)

    def session_start(self) -> None:
        """Record that the session exists."""
        self._record(SessionStartEvent, "INFO")

    def session_end(self) -> None:
        """Record that the session is over."""
        duration = timedelta(seconds=self._clock.now() - self._started_s)
        self._record(SessionEndEvent, "INFO", lambda: {"duration": str(duration)})

    def _record(
        self,
        kind: Callable[..., TelemetryEvent],
        severity: Severity,
        make: Callable[[], dict[str, Any]] = dict,
        *,
        urgent: bool = False,
    ) -> None:
        """Queue an event of `kind`; `make` gives the fields that are its own."""
        if not self._usable():
            return
        try:
            with self._lock:
                self._put(kind, severity, make)
                waiting = len(self._queue)
            self._notify(_SOON if urgent or waiting >= _BATCH else _LATER)
        except Exception:  # noqa: BLE001 - telemetry must not fail its caller
            _log.debug("an event could not be recorded", exc_info=True)

    def _usable(self) -> bool:
        # In a forked child the loop is gone, and the lock may be held by a thread that is too.
        return not self._refused and os.getpid() == self._pid

    def _known(self, error: Exception) -> bool:
        """Whether an error, or one that it came from, was reported; from now on it was."""
        links = list(chain(error))
        with self._lock:
            if any(ref() is link for ref in self._reported for link in links):
                return True
            with contextlib.suppress(TypeError):  # Python's own errors cannot be referred to
                self._reported.append(weakref.ref(error))
        return False

    def _put(
        self,
        kind: Callable[..., TelemetryEvent],
        severity: Severity,
        make: Callable[[], dict[str, Any]],
    ) -> None:
        if len(self._queue) >= _QUEUE:
            self.dropped += 1
            return
        event = kind(
            event_id=str(uuid.uuid4()),
            event_session_index=self._next_index,
            severity=severity,
            timestamp=datetime.fromtimestamp(self._clock.wall(), UTC),
            **make(),
        )
        self._queue.append(event)
        self._next_index += 1

    def _user_error(self, error: Exception) -> dict[str, Any]:
        return {"event_name": "user_error", "event_data": self._redactor.facts(error)}

    def _bug(self, error: Exception) -> dict[str, Any]:
        return {
            "error_message": self._redactor.message(error),
            "error_type": self._redactor.facts(error)["error_type"],
            "traceback": self._redactor.frames(error),
        }

    def _notify(self, news: int) -> None:
        """Wake the loop, unless it was notified already; a burst of events posts once."""
        signals = self._signals
        if signals is not None and news > self._notified:
            self._notified = news
            with contextlib.suppress(ClosedError):
                self._post(lambda: signals.notify(news))

    # -- sending, on the loop -----------------------------------------------------------------

    async def run(self) -> None:
        """Send what is queued within ten seconds, or at once when asked, until cancelled."""
        signals = self._signals = _Signals()
        self._loop = asyncio.get_running_loop()
        at_exit.watch(self)
        try:
            while not self._refused:
                # An idle client has no timer.
                if not self._queue:
                    await signals.queued.wait()
                async with time_limit(self._clock, _EVERY_S):
                    await signals.soon.wait()
                signals.clear()
                self._notified = _NOTHING
                await self._send_queued()
        finally:
            self._signals = None

    async def flush(self, limit_s: float = _FLUSH_S) -> None:
        """Try to send everything that is queued, for at most `limit_s`."""
        async with time_limit(self._clock, limit_s):
            await self._send_queued()

    async def _send_queued(self) -> None:
        """Send batch after batch; one that cannot be sent ends the round."""
        while self._queue and not self._refused and await self._deliver(self._take()):
            pass

    def _take(self) -> list[TelemetryEvent]:
        with self._lock:
            count = min(_BATCH, len(self._queue))
            self._sending = [self._queue.popleft() for _ in range(count)]
            return self._sending

    async def _deliver(self, batch: list[TelemetryEvent]) -> bool:
        """Send one batch, a few times if need be; True when the server has it."""
        for attempt in range(_ATTEMPTS):
            try:
                if attempt:
                    await self._clock.sleep(2.0 ** (attempt - 1))
                await self._api().call(routes.TELEMETRY, self._request(batch))
            except asyncio.CancelledError:
                with self._lock:
                    self._queue.extendleft(reversed(batch))
                    self._sending = []
                raise
            except Exception as error:  # noqa: BLE001 - telemetry must not fail its caller
                _log.debug("telemetry was not delivered: %s", self._redactor.message(error))
                if not self._may_try_again(error):
                    break
            else:
                self._ended(dropped=0)
                return True
        self._ended(dropped=len(batch))
        return False

    def _ended(self, dropped: int) -> None:
        """No batch is under way any more; notify `wait_sent`."""
        with self._sent:
            self._sending = []
            self.dropped += dropped
            self._sent.notify_all()

    def _may_try_again(self, error: Exception) -> bool:
        # A server without the route will not grow one during this session.
        self._refused = isinstance(error, NotFoundError)
        return isinstance(error, TinkerError) and error.retryable

    # -- at the end of the process, from its main thread -------------------------------------

    def wait_sent(self, limit_s: float) -> None:
        """Block until no error waits to be sent, for at most `limit_s`."""
        if self._usable():
            with self._sent:
                self._sent.wait_for(lambda: not self._has_unsent_errors(), max(limit_s, 0.0))

    def _has_unsent_errors(self) -> bool:
        """Whether an error is not sent yet, and still can be."""
        if self._refused or self._loop is None or not self._loop.is_running():
            return False
        return any(event.severity in _URGENT for event in (*self._sending, *self._queue))

    def _request(self, batch: list[TelemetryEvent]) -> TelemetrySendRequest:
        import platform

        return TelemetrySendRequest(
            events=batch,
            platform=platform.system(),
            sdk_version=PROTOCOL_VERSION,
            session_id=self.session_id or self._sessionless_id,
            process_uuid=process_uuid(),
        )


def process_uuid() -> str:
    """Identifies this process; a forked child has an id of its own."""
    return _uuid_of(os.getpid())


@cache
def _uuid_of(pid: int) -> str:
    return str(uuid.uuid4())
