"""The end of the process: errors that telemetry has recorded are sent before it dies.

The client's loop sends telemetry, and its daemon thread ends with the process. So the exit waits
for errors that are not sent yet, for two seconds at most, and for nothing else. Uncaught errors of
the main thread and of other threads are recorded, too.
`os._exit` and signals that kill the process leave no time for any of this.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from tinkex.clock import SystemClock

if TYPE_CHECKING:
    from tinkex.telemetry.events import Telemetry

LIMIT_S = 2.0


def watch(telemetry: Telemetry) -> None:
    """Have the errors of `telemetry` sent before the process ends."""
    _watch.add(telemetry)


class _Watch:
    """The telemetry of this process."""

    def __init__(self) -> None:
        # Mutable state: what is watched, and the hook for threads that was there before this one.
        self._watched: weakref.WeakSet[Telemetry] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._earlier_hook = None

    def add(self, telemetry: Telemetry) -> None:
        with self._lock:
            self._watched.add(telemetry)
            # Again each time: callbacks run in reverse order, and this one must come before that
            # of an embedded server, which may have been registered since.
            atexit.unregister(self._flush)
            atexit.register(self._flush)
            if self._earlier_hook is None:
                self._earlier_hook = threading.excepthook
                threading.excepthook = self._thread_failed

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._report(args.exc_value)
        assert self._earlier_hook is not None
        self._earlier_hook(args)

    def _report(self, error: BaseException) -> None:
        for telemetry in self._all():
            telemetry.exception(error)

    def _all(self) -> list[Telemetry]:
        with self._lock:
            return list(self._watched)

    def _flush(self) -> None:
        try:
            # What Python has printed as the error that ended the program.
            error = getattr(sys, "last_value", None)
            if error is not None:
                self._report(error)
            clock = SystemClock()
            give_up_at = clock.now() + LIMIT_S
            for telemetry in self._all():
                telemetry.wait_sent(give_up_at - clock.now())
        except KeyboardInterrupt:
            pass  # the user presses Ctrl-C again: do not wait

    def after_fork(self) -> None:
        """In a forked child: what was recorded before is sent by the parent."""
        self._lock = threading.Lock()
        self._watched = weakref.WeakSet()


_watch = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch.after_fork)
