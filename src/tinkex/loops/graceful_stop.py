"""The first Ctrl-C finishes the step that is being computed; the second aborts."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from tinkex.futures.future import APIFuture

_MESSAGE = (
    b"Stopping after the step that is being computed; saving it.\n"
    b"Ctrl-C again aborts: steps after the last save are lost.\n"
)
# On a terminal the live view is cleared first: the cursor stands at its beginning.
_CLEAR = b"\r\033[J"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """While entered, SIGINT and SIGTERM set `asked`; the next one of them raises.

    Outside the main thread Python allows no signal handlers, so `asked` stays False there.
    """

    def __init__(self) -> None:
        # Mutable state: whether a signal came, the previous handlers, and a pair of sockets through
        # which handlers and callbacks wake up `until`.
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pair = socket.socketpair()
            self._pair[1].setblocking(False)
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        for end in self._pair or ():
            end.close()

    def until(self, future: APIFuture[Any]) -> bool:
        """Wait until `future` is done or the first signal has come; returns `asked`."""
        if self._pair is not None:
            # Not `future.result()`: that would keep waiting after the handler has run.
            future.add_done_callback(lambda _: self._wake())
            while not (self.asked or future.done()):
                self._pair[0].recv(64)
        return self.asked

    def _wake(self) -> None:
        if self._pair is not None:
            with suppress(OSError):  # closed, or full of earlier calls
                self._pair[1].send(b".")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        # Not through `sys.stderr`: the signal may have interrupted a write to that stream, and
        # entering its buffer again would raise.
        os.write(2, (_CLEAR if os.isatty(2) else b"") + _MESSAGE)
        self._wake()
