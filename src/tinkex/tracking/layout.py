"""The state of a run as lines of text of a given width, without colour. Pure functions."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING

from tinkex.tracking.series import EVAL, drawable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tinkex.tracking.state import RunState

# These metrics come first, the others in the order of their appearance.
_FIRST = ("loss", "reward", "accuracy", "margin")
# Shown in another form, or not in a line.
_ELSEWHERE = frozenset({"step", "time_s", "tokens", "tokens_per_s", "learning_rate"})
_BAR, _SHORTEST_BAR = 40, 8
_SPARK = 20
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " ._-=*%#@"
_GAP = "  "


def plain_line(state: RunState, width: int) -> str:
    """One step in one line, for files and pipes."""
    pieces = [f"{state.unit} {_of(state)}", *_values(state, own_step=True), *_speed(state)]
    return cut(as_many_as_fit(pieces, width), width)


def live_lines(state: RunState, width: int, *, unicode: bool) -> list[str]:
    """The block that a terminal shows during the run: bar, metrics, evaluations."""
    curve = [row["loss"] for row in state.measured if "loss" in row]
    spark = sparkline(curve, _SPARK, unicode=unicode)
    values = list(_values(state, own_step=False))
    if spark and values and width >= 2 * _SPARK:
        values[0] = f"{values[0]}  {spark}"
    measures = [*values, *_speed(state)] if state.latest else [state.stage]
    evaluations = list(_evaluations(state))
    lines = [bar_line(state, width, unicode=unicode), as_many_as_fit(measures, width)]
    if evaluations:
        lines.append(as_many_as_fit(evaluations, width))
    return [cut(line, width) for line in lines if line]


def bar_line(state: RunState, width: int, *, unicode: bool) -> str:
    """Title, bar and step count; without space for a bar, as much as fits."""
    count = [_of(state), f"{state.share:3.0%}"] if state.total else [_of(state)]
    room = width - columns_of("  ".join(count)) - 2
    title = cut(state.title, max(room // 2, room - _BAR // 2))
    bar = _bar(state.share, min(room - columns_of(title), _BAR), unicode=unicode)
    if not state.total or len(bar) < _SHORTEST_BAR:
        return as_many_as_fit([*(each.strip() for each in count), cut(state.title, room)], width)
    return f"{title} {bar} {'  '.join(count)}"


def summary(state: RunState, width: int, *, unicode: bool) -> str:
    """The line that stays after the run."""
    steps = state.step - state.started_at
    of_all = "" if state.is_last else f" of {state.total - state.started_at}" if state.total else ""
    noun = state.unit if steps == 1 and not of_all else f"{state.unit}s"
    pieces = [f"{steps}{of_all} {noun} in {duration(state.elapsed_s)}"]
    losses = [row["loss"] for row in state.measured if "loss" in row]
    if losses:
        arrow = "→" if unicode else "->"
        pieces.append(f"loss {number(losses[0])} {arrow} {number(losses[-1])}")
    pieces += _evaluations(state)
    if state.mean_tokens_per_s is not None:
        pieces.append(f"{number(round(state.mean_tokens_per_s))} tokens/s")
    return cut(as_many_as_fit(pieces, width), width)


def _values(state: RunState, *, own_step: bool) -> Iterator[str]:
    """Names and values; `own_step`: those of this step, with evaluations."""
    names = [name for name in _FIRST if name in state.latest]
    names += [name for name in state.latest if name not in names and name not in _ELSEWHERE]
    for name in names:
        step, value = state.latest[name]
        if (step == state.step) if own_step else not name.startswith(EVAL):
            yield f"{name.replace('_', ' ')} {number(value)}"


def _evaluations(state: RunState) -> Iterator[str]:
    for name, (step, value) in state.latest.items():
        if name.startswith(EVAL):
            yield f"{name.replace('_', ' ')} {number(value)} (step {step})"


def _speed(state: RunState) -> Iterator[str]:
    if state.tokens_per_s is not None:
        yield f"{number(_whole(state.tokens_per_s))} tokens/s"
    if state.left_s is not None and not state.is_last:
        yield f"{duration(state.left_s)} left"
    rate = state.value("learning_rate")
    if rate is not None:
        yield f"lr {rate:.2e}"


def _whole(value: float) -> float:
    return round(value) if abs(value) < 1e15 else value  # also false for NaN


def _of(state: RunState) -> str:
    return (
        f"{state.step:>{len(str(state.total))}}/{state.total}" if state.total else str(state.step)
    )


def _bar(share: float, width: int, *, unicode: bool) -> str:
    full, rest = ("━", "─") if unicode else ("#", "-")
    filled = int(share * max(width, 0))
    return full * filled + rest * (max(width, 0) - filled)


# -- numbers and text ----------------------------------------------------------------------------


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
    """A row of bars, the highest for the largest value; a gap for one that is not finite."""
    finite = [value for value in values if drawable(value)]
    if not finite or width < 1:
        return ""
    bars, low, span = _BARS if unicode else _ASCII_BARS, min(finite), max(finite) - min(finite)
    return "".join(
        bars[0] if mean is None else bars[1 + round((mean - low) / (span or 1.0) * 7)]
        for mean in _means(values, min(width, len(values)))
    )


def _means(values: Sequence[float], count: int) -> Iterable[float | None]:
    """The means of `count` groups of adjacent values; None for a group without a finite value."""
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
    """The pieces in order, without those that do not fit."""
    line = ""
    for piece in pieces:
        longer = f"{line}{_GAP}{piece}" if line else piece
        if columns_of(longer) <= width:
            line = longer
    return line
