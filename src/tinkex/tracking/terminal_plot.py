"""Curves as text: in Braille dots, or in ASCII where the stream cannot show them.

A Braille character holds two by four dots, so a line is eight times finer than the character cells.
Evaluations are marks, one per cell. There is no dependency: `plot` works without any extra.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from tinkex.tracking.layout import cut, number
from tinkex.tracking.series import finite, is_evaluation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.tracking.series import Points

_MARKS = ("●", "◆", "▲", "■", "○", "◇", "△", "□")
_ASCII_MARKS = ("*", "o", "x", "+", "#", "%", "@", "&")
_LINE = "⣀⣀"
_LEAST_WIDTH, _LEAST_HEIGHT = 24, 5
_DOTS_X, _DOTS_Y = 2, 4
_BRAILLE = 0x2800
# The bit of each dot: the left column from the top, then the right one.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_NORMAL = "\033[0m"
_PAINTS = ("\033[36m", "\033[33m", "\033[32m", "\033[35m", "\033[34m", "\033[31m")

Where = tuple[float, float]
"""A position from (0, 0), bottom left, to (1, 1), top right."""


def plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    width: int,
    height: int,
    unicode: bool,
    *,
    colour: bool = False,
) -> str:
    """Curves with axes and a legend, in at most `width` columns and `height` lines.

    Without a finite value, or without enough space, the result is one line of text.
    """
    drawn = {name: points for name in series if (points := finite(series[name]))}
    if not drawn:
        return cut("nothing to plot yet", width)
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        pieces = (f"{name} {number(points[-1][1])}" for name, points in drawn.items())
        return cut("  ".join(pieces), width)
    return "\n".join(_Plot(drawn, width, height, unicode, colour=colour).lines())


class _Plot:
    """One plot: the range of its values, and the text around the canvas."""

    def __init__(
        self, series: Mapping[str, Points], width: int, height: int, unicode: bool, *, colour: bool
    ) -> None:
        self._series, self._unicode, self._colour, self._width = series, unicode, colour, width
        every = [point for points in series.values() for point in points]
        self._left, self._right = min(x for x, _ in every), max(x for x, _ in every)
        self._low, self._high = _widened(min(y for _, y in every), max(y for _, y in every))
        rows = height - 3  # the axis, its labels, the legend
        self._labels = _labels(self._low, self._high, rows)
        self._indent = max(len(label) for label in self._labels)
        self._canvas = _Canvas(width - self._indent - 2, rows, unicode=unicode)

    def lines(self) -> list[str]:
        """The whole plot."""
        for at, (name, points) in enumerate(self._series.items()):
            self._draw(at, name, [self._where(point) for point in points])
        tick, side, corner, floor = "┤│└─" if self._unicode else "||+-"
        rows = zip(self._labels, self._canvas.rows(colour=self._colour), strict=True)
        return [
            self._legend(),
            *(
                f"{label:>{self._indent}} {tick if label else side}{row}".rstrip()
                for label, row in rows
            ),
            f"{'':{self._indent}} {corner}{floor * self._canvas.width}",
            self._steps(),
        ]

    def _draw(self, at: int, name: str, points: list[Where]) -> None:
        if self._is_line(at, name):
            self._canvas.line(_thinned(points, self._canvas.columns), self._mark(at), at)
        elif is_evaluation(name):
            self._canvas.points(points, self._mark(at), at)
        else:
            self._canvas.points(_thinned(points, self._canvas.width), self._mark(at), at)

    def _is_line(self, at: int, name: str) -> bool:
        """Whether to draw a line. Without colour all lines look alike, so only the first is one."""
        return not is_evaluation(name) and (at == 0 or self._colour or not self._unicode)

    def _mark(self, at: int) -> str:
        marks = _MARKS if self._unicode else _ASCII_MARKS
        return marks[at % len(marks)]

    def _legend(self) -> str:
        """The names of the series, as many as fit."""
        room = self._width - self._indent - 2
        shown: list[str] = []
        for at, name in enumerate(self._series):
            sign = _LINE if self._unicode and self._is_line(at, name) else self._mark(at)
            text = cut(f"{sign} {name.replace('_', ' ')}", room)
            room -= len(text) + 3
            shown.append(_paint(text, at, colour=self._colour))
            if room < 6:
                break
        return " " * (self._indent + 2) + "   ".join(shown)

    def _steps(self) -> str:
        """The ends of the step axis."""
        left, right = number(_int(self._left)), number(_int(self._right))
        room = self._canvas.width - len(left) - len(right)
        middle = "step" if room > 8 else ""
        return f"{'':{self._indent + 2}}{left}{middle:^{max(room, 1)}}{right}"

    def _where(self, point: tuple[float, float]) -> Where:
        across, up = self._right - self._left, self._high - self._low
        x = (point[0] - self._left) / across if across else 0.0
        return x, (point[1] - self._low) / up


class _Canvas:
    """A grid of character cells; later drawings are on top."""

    def __init__(self, width: int, height: int, *, unicode: bool) -> None:
        self.width, self.height = width, height
        self._fine = (_DOTS_X, _DOTS_Y) if unicode else (1, 1)
        # Mutable: the contents of each used cell, and the series that drew it last.
        self._dots: dict[tuple[int, int], int] = {}
        self._marks: dict[tuple[int, int], str] = {}
        self._owner: dict[tuple[int, int], int] = {}

    @property
    def columns(self) -> int:
        """The horizontal resolution of a line."""
        return self.width * self._fine[0]

    def line(self, points: list[Where], mark: str, owner: int) -> None:
        """Connect the points with dots, or with marks in ASCII."""
        places = [self._place(point, self._fine) for point in points]
        for start, end in zip(places, places[1:] or places, strict=False):
            for x, y in _between(start, end):
                self._dot(x, y, mark, owner)

    def points(self, points: list[Where], mark: str, owner: int) -> None:
        """A mark at each point."""
        for point in points:
            cell = self._place(point, (1, 1))
            self._marks[cell], self._owner[cell] = mark, owner

    def rows(self, *, colour: bool) -> list[str]:
        """The cells as text, from the top row down."""
        return [self._row(y, colour=colour) for y in range(self.height)]

    def _row(self, y: int, *, colour: bool) -> str:
        cells = [(x, y) for x in range(self.width)]
        return "".join(
            _paint("".join(map(self._text, run)), owner, colour=colour and owner is not None)
            for owner, run in groupby(cells, key=self._owner.get)
        )

    def _text(self, cell: tuple[int, int]) -> str:
        dots = self._dots.get(cell)
        return self._marks.get(cell) or (chr(_BRAILLE + dots) if dots else " ")

    def _dot(self, x: int, y: int, mark: str, owner: int) -> None:
        fine_x, fine_y = self._fine
        cell = (x // fine_x, y // fine_y)
        self._owner[cell] = owner
        if self._fine == (1, 1):
            self._marks[cell] = mark
        else:
            self._dots[cell] = self._dots.get(cell, 0) | _BITS[x % fine_x][y % fine_y]

    def _place(self, point: Where, fine: tuple[int, int]) -> tuple[int, int]:
        """The column and row of a position, counted from the top left."""
        columns, rows = self.width * fine[0], self.height * fine[1]
        return round(point[0] * (columns - 1)), round((1 - point[1]) * (rows - 1))


def _paint(text: str, owner: int | None, *, colour: bool) -> str:
    """Text in the colour that the series has on the canvas."""
    return f"{_PAINTS[(owner or 0) % len(_PAINTS)]}{text}{_NORMAL}" if colour else text


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot from start to end."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * at / steps), round(y0 + (y1 - y0) * at / steps))
        for at in range(steps + 1)
    ]


def _thinned(points: list[Where], columns: int) -> list[Where]:
    """At most one point per column: the mean of the points in it."""
    groups: dict[int, list[Where]] = {}
    for point in points:
        groups.setdefault(round(point[0] * (columns - 1)), []).append(point)
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for _, group in sorted(groups.items())
    ]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with a height, also for a single value."""
    if high - low > abs(high) * 1e-9:
        return low, high
    margin = abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _labels(low: float, high: float, rows: int) -> list[str]:
    """The value at the top row, the bottom row, and some between."""
    every = max(rows // 4, 2)
    return [
        number(high + (low - high) * row / max(rows - 1, 1))
        if row in (0, rows - 1) or (row % every == 0 and rows - 1 - row >= every // 2 + 1)
        else ""
        for row in range(rows)
    ]


def _int(value: float) -> float:
    return int(value) if value == int(value) else value
