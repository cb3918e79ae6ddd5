"""Numbers, times and text as they stand in a narrow line."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " ._-=*%#@"
_GAP = "  "
# Beyond it the difference of two numbers need not be one.
_LARGEST = 1e300


def drawable(value: float) -> bool:
    """Whether the number has a place on an axis."""
    return abs(value) <= _LARGEST  # false for NaN


def number(value: float) -> str:
    """Short, with about four digits: 1.2345, 0.00012, 12,345."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    if abs(value) >= 0.01 or value == 0:
        return str(value) if isinstance(value, int) else f"{value:.4f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """As on a stopwatch: 0:07, 2:31, 1:02:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int, *, unicode: bool) -> str:
    """A row of bars, the highest for the largest; a gap where there is no finite value."""
    finite = [value for value in values if drawable(value)]
    if not finite or width < 1:
        return ""
    bars, low, span = _BARS if unicode else _ASCII_BARS, min(finite), max(finite) - min(finite)
    return "".join(
        bars[0] if mean is None else bars[1 + round((mean - low) / (span or 1.0) * 7)]
        for mean in _means(values, min(width, len(values)))
    )


def _means(values: Sequence[float], count: int) -> Iterable[float | None]:
    """The values in `count` groups in order, each as the mean of what is finite in it."""
    for at in range(count):
        group = values[at * len(values) // count : (at + 1) * len(values) // count]
        finite = [value for value in group if drawable(value)]
        yield sum(finite) / len(finite) if finite else None


def columns_of(text: str) -> int:
    """How many columns of a terminal the text takes up."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, width: int) -> str:
    """The text in one line of at most `width` columns, without control characters."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    while columns_of(clean) > max(width, 0):
        clean = clean[:-1]
    return clean


def as_many_as_fit(pieces: Iterable[str], width: int) -> str:
    """The pieces in order, without those that would not fit any more."""
    line = ""
    for piece in pieces:
        longer = f"{line}{_GAP}{piece}" if line else piece
        if columns_of(longer) <= width:
            line = longer
    return line
