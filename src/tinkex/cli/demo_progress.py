"""What `tinkex demo` shows while it works: one line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from tinkex.clock import SystemClock
from tinkex.tracking.layout import bar_line, plain_line
from tinkex.tracking.numbers import cut, duration, number
from tinkex.tracking.state import RunState
from tinkex.tracking.views import PLAIN_WIDTH, can_redraw, speaks_unicode, terminal_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from tinkex.clock import Clock

# Steps that get a line where lines cannot be written over.
_PLAIN_LINES = 4
_BAR_WIDTH = 50
_CLEAR_LINE = "\r\033[K"


class DemoProgress:
    """Shows the phases of the demo and the steps of its training on standard error.

    A stream that cannot be written to is ignored: it must not end the training.
    """

    def __init__(
        self, steps: int, *, stream: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._clock = clock or SystemClock()
        self._live = can_redraw(self._stream)
        # Mutable: when the phase began, and the state of the training once a step is done.
        self._began = self._clock.now()
        self._state: RunState | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._write(_CLEAR_LINE)

    def phase(self, text: str) -> None:
        """Begin another part of the demo."""
        self._began = self._clock.now()
        self._write(self._live_line(text) if self._live else f"{text}\n")

    def stage(self, text: str) -> None:
        """Replace the line on a terminal; plain output does not have these."""
        if self._live:
            self._write(self._live_line(text))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a training step."""
        now = self._clock.now()
        if self._state is None:
            self._state = RunState(self._steps, "Training", step - 1, self._began)
        self._state.add(step, values, now)
        if self._live:
            self._write(self._live_line(self._bar(self._state)))
        elif step % -(-self._steps // _PLAIN_LINES) == 0 or self._state.is_last:
            self._write(plain_line(self._state, PLAIN_WIDTH) + "\n")

    def note(self, text: str) -> None:
        """Ignore a note of the run, such as a save: the demo is about the result."""

    def _bar(self, state: RunState) -> str:
        pieces = [bar_line(state, _BAR_WIDTH, unicode=speaks_unicode(self._stream))]
        loss = state.value("loss")
        if loss is not None:
            pieces.append(f"loss {number(loss)}")
        if state.left_s is not None and not state.is_last:
            pieces.append(f"{duration(state.left_s)} left")
        return "  ".join(pieces)

    def _live_line(self, text: str) -> str:
        # A line that wraps could not be written over.
        columns, _ = terminal_size(self._stream)
        return f"{_CLEAR_LINE}{cut(text, columns - 1)}"

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
