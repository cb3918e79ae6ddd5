"""Curves as text: in Braille dots where the terminal has them, in plain characters elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.tracking.canvas import Canvas, paint
from tinkex.tracking.numbers import cut, number
from tinkex.tracking.series import finite, is_evaluation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.tracking.canvas import Where
    from tinkex.tracking.series import Points

_MARKS = ("●", "◆", "▲", "■", "○", "◇", "△", "□")
_ASCII_MARKS = ("*", "o", "x", "+", "#", "%", "@", "&")
_LINE = "⣀⣀"
_LEAST_WIDTH, _LEAST_HEIGHT = 24, 5


def plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    width: int,
    height: int,
    unicode: bool,
    *,
    colour: bool = False,
) -> str:
    """Curves with their axes and a legend, in at most `width` columns and `height` lines.

    A plot that would be too small to read becomes one line of text, and so does one without any
    finite value.
    """
    drawn = {name: points for name in series if (points := finite(series[name]))}
    if not drawn:
        return cut("nothing to plot yet", width)
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        pieces = (f"{name} {number(points[-1][1])}" for name, points in drawn.items())
        return cut("  ".join(pieces), width)
    return "\n".join(_Plot(drawn, width, height, unicode, colour=colour).lines())


class _Plot:
    """One plot: where its values lie, and the text around the canvas."""

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
        self._canvas = Canvas(width - self._indent - 2, rows, unicode=unicode)

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
        """Lines of dots look alike without colours, so only the first series is one then."""
        return not is_evaluation(name) and (at == 0 or self._colour or not self._unicode)

    def _mark(self, at: int) -> str:
        marks = _MARKS if self._unicode else _ASCII_MARKS
        return marks[at % len(marks)]

    def _legend(self) -> str:
        """Which is which, as much of it as fits."""
        room = self._width - self._indent - 2
        shown: list[str] = []
        for at, name in enumerate(self._series):
            sign = _LINE if self._unicode and self._is_line(at, name) else self._mark(at)
            text = cut(f"{sign} {name.replace('_', ' ')}", room)
            room -= len(text) + 3
            shown.append(paint(text, at, colour=self._colour))
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


def _thinned(points: list[Where], columns: int) -> list[Where]:
    """At most one point per column: the mean of those that fall into it."""
    groups: dict[int, list[Where]] = {}
    for point in points:
        groups.setdefault(round(point[0] * (columns - 1)), []).append(point)
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for _, group in sorted(groups.items())
    ]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that has a height, also for one value, also for very large ones."""
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
