"""Curves as an SVG picture; no library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 430, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 40, 44
COLORS = ("#0b62a4", "#d1531d")
INK, FAINT = "#333", "#ddd"


@dataclass(frozen=True)
class Line:
    """One curve; all that share a label share a color, and only the first is drawn thick."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; the outermost ticks are its bounds."""

    title: str
    x_title: str
    ticks: Sequence[float]
    lines: Sequence[Line]
    first: int = 0
    """The number of the first value on the x axis."""
    log: bool = False
    marked: float | None = None
    """A value to draw a dashed line at."""

    @property
    def last(self) -> int:
        """The number of the last value of the longest curve."""
        return self.first + max(len(line.values) for line in self.lines) - 1

    def x(self, number: float) -> float:
        """From left to right."""
        span = max(1, self.last - self.first)
        return LEFT + (number - self.first) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """From bottom to top; what lies outside is drawn at the edge."""
        low, high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])
        share = (self._scaled(max(value, self.ticks[0])) - low) / (high - low)
        return TOP + (1 - min(share, 1.0)) * (HEIGHT - TOP - BOTTOM)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def svg(panels: Sequence[Panel]) -> str:
    """All panels side by side."""
    width = WIDTH * len(panels)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    parts = [head, f'<rect width="{width}" height="{HEIGHT}" fill="white"/>']
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    parts = [_text(LEFT, 20, panel.title, weight="bold")]
    for tick in panel.ticks:
        parts.append(_path([(LEFT, panel.y(tick)), (WIDTH - RIGHT, panel.y(tick))], FAINT, 1))
        parts.append(_text(LEFT - 6, panel.y(tick) + 4, f"{tick:g}", anchor="end"))
    for number in range(panel.first, panel.last + 1):
        if (number - panel.first) % 2 == 0:
            parts.append(_text(panel.x(number), HEIGHT - BOTTOM + 18, str(number), anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 8, panel.x_title, anchor="middle"))
    if panel.marked is not None:
        at = panel.y(panel.marked)
        parts.append(_path([(LEFT, at), (WIDTH - RIGHT, at)], INK, 1, dashed=True))
    return [*parts, *_curves(panel)]


def _curves(panel: Panel) -> list[str]:
    colors: dict[str, str] = {}
    parts: list[str] = []
    for line in panel.lines:
        thick = line.label not in colors
        color = colors.setdefault(line.label, COLORS[len(colors) % len(COLORS)])
        points = [
            (panel.x(panel.first + number), panel.y(value))
            for number, value in enumerate(line.values)
        ]
        parts.append(_path(points, color, 2.5 if thick else 1))
    # A falling curve leaves the upper right corner free, a rising one the lower right.
    falling = panel.lines[0].values[0] > panel.lines[0].values[-1]
    top = TOP + 16 if falling else HEIGHT - BOTTOM - 18 * len(colors) + 4
    for number, (label, color) in enumerate(colors.items()):
        at = top + 18 * number
        parts.append(_path([(WIDTH - 190, at - 4), (WIDTH - 170, at - 4)], color, 2.5))
        parts.append(_text(WIDTH - 164, at, label))
    return parts


def _path(
    points: Sequence[tuple[float, float]], color: str, width: float, *, dashed: bool = False
) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width:g}"'
        f'{dashes} stroke-linejoin="round"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
