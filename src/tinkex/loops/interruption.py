"""Ctrl-C as a wish: the first one asks the loop to come to an end, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_ASKED = (
    b"\nFinishing the step and saving. Once more leaves at once, and loses what is not saved.\n"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered, SIGINT and SIGTERM set `asked`; each of them does so once.

    Outside the main thread, where Python allows no handlers, nobody can ask.
    """

    def __init__(self) -> None:
        # Mutable state: whether somebody asked, and what the signals did before.
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
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

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        # Not through a stream, which may be in the middle of a line of its own.
        os.write(2, _ASKED)
