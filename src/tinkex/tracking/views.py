"""The two views of a run: a block that is redrawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tinkex.tracking.layout import cut, live_lines, plain_line
from tinkex.tracking.series import EVAL, by_panel, series_of
from tinkex.tracking.terminal_plot import plot

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TextIO

    from rich.console import Console

    from tinkex.tracking.state import RunState

PLAIN_WIDTH = 80
# A pipe gets about this many lines per run, and at least one line in this time.
_LINES = 50
_QUIET_S = 30.0
# Redrawing more often would not be visible.
_REDRAW_S = 0.1
_CHART_ROWS, _LEAST_CHART_ROWS, _CHART_COLUMNS = 14, 7, 100
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\033[{}A", "\033[K", "\033[J"
BOLD, DIM, GREEN, CYAN = "\033[1m", "\033[2m", "\033[32m", "\033[36m"
_NORMAL = "\033[0m"


def open_view(stream: TextIO, *, chart: bool) -> LiveView | PlainView:
    """The view for a stream; its methods raise OSError or ValueError when the stream is gone."""
    return LiveView(stream, chart=chart) if can_redraw(stream) else PlainView(stream)


def can_redraw(stream: TextIO) -> bool:
    """Whether lines can be redrawn: on a terminal, unless TERM is dumb."""
    if not stream.isatty():
        return False
    console = _console(stream)
    return console is None or not console.is_dumb_terminal


def speaks_unicode(stream: TextIO) -> bool:
    """Whether the stream can encode bars and dots; a stream in memory can."""
    encoding: str | None = getattr(stream, "encoding", None)
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")


def shows_colour(stream: TextIO) -> bool:
    """Whether to use colour: rich knows terminals and NO_COLOR. Without rich there is no colour."""
    console = _console(stream) if stream.isatty() else None
    return console is not None and console.color_system is not None and not console.no_color


def painted(text: str, style: str, *, colour: bool) -> str:
    """The text in a style, such as `BOLD`; as it is without colour."""
    return f"{style}{text}{_NORMAL}" if colour else text


def _console(stream: TextIO) -> Console | None:
    """A rich console for the stream; None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


class PlainView:
    """Lines for some steps: the first, the last, every evaluation, and some in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Mutable: when the last line was written, and the last step that was drawn.
        self._written: float | None = None
        self._step: int | None = None

    def draw(self, state: RunState, now: float) -> None:
        """Write a line if one is due."""
        seen, self._step = state.step == self._step, state.step
        if state.latest and not seen and self._is_due(state, now):
            self._written = now
            self.line(plain_line(state, PLAIN_WIDTH))

    def line(self, text: str) -> None:
        """Write the text."""
        _write(self._stream, f"{text}\n")

    def stage(self, text: str) -> None:
        """Write it, as a sentence."""
        self.line(f"{text[:1].upper()}{text[1:]} ...")

    def close(self) -> None:
        """Plain lines stay."""

    def _is_due(self, state: RunState, now: float) -> bool:
        every = max(-(-state.total // _LINES), 1)
        evaluated = any(
            step == state.step for name, (step, _) in state.latest.items() if name.startswith(EVAL)
        )
        return (
            self._written is None
            or state.is_last
            or evaluated
            or state.step % every == 0
            or now - self._written >= _QUIET_S
        )


class LiveView:
    """A few lines at the bottom of a terminal, redrawn in place.

    Between two drawings the cursor is at the beginning of the block, so that other output moves the
    block down instead of breaking it, and a signal handler can clear it. That is why this is not
    `rich.live`, which leaves the cursor, hidden, at the end.
    """

    def __init__(self, stream: TextIO, *, chart: bool) -> None:
        self._stream = stream
        self._chart = chart
        self._unicode = speaks_unicode(stream)
        self._colour = shows_colour(stream)
        # Mutable: when it was last drawn.
        self._drawn: float | None = None

    def draw(self, state: RunState, now: float) -> None:
        """Redraw the block."""
        if self._drawn is not None and now - self._drawn < _REDRAW_S and not state.is_last:
            return
        self._drawn = now
        columns, rows = terminal_size(self._stream)
        lines = self._lines(state, columns - 1, rows - 1)[: max(rows - 1, 1)]
        body = "\n".join(f"{_CLEAR_LINE}{line}" for line in lines)
        back = _UP.format(len(lines) - 1) if len(lines) > 1 else ""
        _write(self._stream, f"\r{body}{_CLEAR_BELOW}\r{back}")

    def line(self, text: str) -> None:
        """Print the text in place of the block; the next drawing is below it."""
        _write(self._stream, f"\r{_CLEAR_BELOW}{text}\n")
        self._drawn = None

    def stage(self, text: str) -> None:
        """Let the next drawing show it without delay."""
        self._drawn = None

    def close(self) -> None:
        """Remove the block."""
        _write(self._stream, f"\r{_CLEAR_BELOW}")

    def _lines(self, state: RunState, width: int, rows: int) -> list[str]:
        lines = live_lines(state, width, unicode=self._unicode)
        shown = [
            painted(line, DIM if at else BOLD, colour=self._colour) for at, line in enumerate(lines)
        ]
        room = min(rows - len(lines), _CHART_ROWS)
        if self._chart and room >= _LEAST_CHART_ROWS and len(state.measured) > 1:
            shown += self._curves(state, min(width, _CHART_COLUMNS), room)
        return shown

    def _curves(self, state: RunState, width: int, rows: int) -> list[str]:
        """The main metric of the run over its steps."""
        judged = [*by_panel(series_of(state.measured)).values()][:1]
        plots = [plot(one, width, rows, self._unicode, colour=self._colour) for one in judged]
        return "".join(plots).splitlines()


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """The current columns and rows of a stream's terminal; 80 by 24 where they are unknown."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, rows = 0, 0
    if columns < 1 or rows < 1:
        columns, rows = shutil.get_terminal_size((PLAIN_WIDTH, 24))
    return columns, rows


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except OSError as error:
        if error.errno in (errno.EIO, errno.EPIPE):
            _point_at_nothing(stream)
        raise


def _point_at_nothing(stream: TextIO) -> None:
    """Discard what is still buffered: flushing it at exit would fail with status 120."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def doing(text: str) -> Generator[None]:
    """Show an activity on standard error; on a terminal the line is removed in the end."""
    stream, clear = sys.stderr, ""
    with suppress(OSError, ValueError):  # standard error is closed
        if isinstance(open_view(stream, chart=False), LiveView):
            room = terminal_size(stream)[0] - len(" ...") - 1
            _write(stream, f"{cut(text, room)} ...\r")
            clear = f"\r{_CLEAR_BELOW}"
        else:
            _write(stream, f"{text} ...\n")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            _write(stream, clear)
