"""The two ways of showing a run: a block redrawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from tinkex.tracking.layout import live_lines, plain_line
from tinkex.tracking.numbers import cut
from tinkex.tracking.series import EVAL, by_panel, series_of
from tinkex.tracking.terminal_plot import plot

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TextIO

    from rich.console import Console

    from tinkex.tracking.state import RunState

PLAIN_WIDTH = 80
# A pipe gets about so many lines of a run, evenly, and one at least so often.
_LINES = 50
_QUIET_S = 30.0
# Faster than this nobody sees it.
_REDRAW_S = 0.1
_CHART_ROWS, _LEAST_CHART_ROWS, _CHART_COLUMNS = 14, 7, 100
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\033[{}A", "\033[K", "\033[J"
_BOLD, _DIM, _NORMAL = "\033[1m", "\033[2m", "\033[0m"


class View(Protocol):
    """Shows a run; may raise OSError or ValueError when nobody looks any more."""

    def draw(self, state: RunState, now: float) -> None:
        """Show where the run is."""
        ...

    def line(self, text: str) -> None:
        """Say something that stays."""
        ...

    def stage(self, text: str) -> None:
        """Say what is being done now, before the first step."""
        ...

    def close(self) -> None:
        """Leave the stream as it was found, without what was only for the moment."""
        ...


def open_view(stream: TextIO, *, chart: bool) -> View:
    """The view that fits the stream."""
    return LiveView(stream, chart=chart) if can_redraw(stream) else PlainView(stream)


def can_redraw(stream: TextIO) -> bool:
    """Whether a line can be written over: on a terminal, unless TERM says that it is a dumb one."""
    if not stream.isatty():
        return False
    console = _console(stream)
    return console is None or not console.is_dumb_terminal


def speaks_unicode(stream: TextIO) -> bool:
    """Whether bars and dots can be written to it; a stream in memory takes everything."""
    encoding: str | None = getattr(stream, "encoding", None)
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")


def shows_colour(stream: TextIO) -> bool:
    """Whether to paint: rich knows terminals, and who set NO_COLOR. Without it nothing is."""
    console = _console(stream) if stream.isatty() else None
    return console is not None and console.color_system is not None and not console.no_color


def _console(stream: TextIO) -> Console | None:
    """What rich knows about the terminal; None where it is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


class PlainView:
    """A line per step, thinned: the first, the last, every evaluation, and some in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Mutable: when the last line was written, and the step last drawn, written or not.
        self._written: float | None = None
        self._step: int | None = None

    def draw(self, state: RunState, now: float) -> None:
        """Write a line if it is time for one."""
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
        """Nothing to take back."""

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
    """A few lines at the bottom of a terminal, written over and over.

    Between two drawings the cursor stands at the beginning of the block, so that what others print
    meanwhile moves the block down instead of tearing it.
    """

    def __init__(self, stream: TextIO, *, chart: bool) -> None:
        self._stream = stream
        self._chart = chart
        self._unicode = speaks_unicode(stream)
        self._colour = shows_colour(stream)
        # Mutable: when it was last drawn.
        self._drawn: float | None = None

    def draw(self, state: RunState, now: float) -> None:
        """Write the block over the last one."""
        if self._drawn is not None and now - self._drawn < _REDRAW_S and not state.is_last:
            return
        self._drawn = now
        columns, rows = terminal_size(self._stream)
        lines = self._lines(state, columns - 1, rows - 1)[: max(rows - 1, 1)]
        body = "\n".join(f"{_CLEAR_LINE}{line}" for line in lines)
        back = _UP.format(len(lines) - 1) if len(lines) > 1 else ""
        _write(self._stream, f"\r{body}{_CLEAR_BELOW}\r{back}")

    def line(self, text: str) -> None:
        """Write the text where the block was; the next drawing comes below."""
        _write(self._stream, f"\r{_CLEAR_BELOW}{text}\n")
        self._drawn = None

    def stage(self, text: str) -> None:
        """The next drawing shows it, however soon."""
        self._drawn = None

    def close(self) -> None:
        """Take the block away."""
        _write(self._stream, f"\r{_CLEAR_BELOW}")

    def _lines(self, state: RunState, width: int, rows: int) -> list[str]:
        lines = live_lines(state, width, unicode=self._unicode)
        painted = [self._paint(line, _DIM if at else _BOLD) for at, line in enumerate(lines)]
        room = min(rows - len(lines), _CHART_ROWS)
        if self._chart and room >= _LEAST_CHART_ROWS and len(state.measured) > 1:
            painted += self._curves(state, min(width, _CHART_COLUMNS), room)
        return painted

    def _curves(self, state: RunState, width: int, rows: int) -> list[str]:
        """What the run is judged by, over its steps."""
        judged = [*by_panel(series_of(state.measured)).values()][:1]
        plots = [plot(one, width, rows, self._unicode, colour=self._colour) for one in judged]
        return "".join(plots).splitlines()

    def _paint(self, text: str, style: str) -> str:
        return f"{style}{text}{_NORMAL}" if self._colour else text


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal behind a stream, now; 80 by 24 where it does not say."""
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
    """Let what is still buffered go nowhere: at exit it would turn a success into status 120."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def doing(text: str) -> Generator[None]:
    """Say on standard error what is being done: a line that a terminal shows until it is over."""
    stream, clear = sys.stderr, ""
    with suppress(OSError, ValueError):  # nobody looks
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
