"""What the views say: the state of a run as lines of a given width. Pure, and without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.tracking.numbers import as_many_as_fit, columns_of, cut, duration, number, sparkline
from tinkex.tracking.series import EVAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.tracking.state import RunState

# What a run is judged by comes first; the rest follows as it came.
_FIRST = ("loss", "reward", "accuracy", "margin")
# Told in another way, or too much for a line.
_ELSEWHERE = frozenset({"step", "time_s", "tokens", "tokens_per_s", "learning_rate"})
_BAR, _SHORTEST_BAR = 40, 8
_SPARK = 20


def plain_line(state: RunState, width: int) -> str:
    """One step in one line, for files and pipes."""
    pieces = [f"{state.unit} {_of(state)}", *_values(state, own_step=True), *_speed(state)]
    return cut(as_many_as_fit(pieces, width), width)


def live_lines(state: RunState, width: int, *, unicode: bool) -> list[str]:
    """The block that a terminal shows while the run is on: bar, measures, evaluations."""
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
    """Title, bar, and how far; without room for a bar, as much of it as fits."""
    count = [_of(state), f"{state.share:3.0%}"] if state.total else [_of(state)]
    room = width - columns_of("  ".join(count)) - 2
    title = cut(state.title, max(room // 2, room - _BAR // 2))
    bar = _bar(state.share, min(room - columns_of(title), _BAR), unicode=unicode)
    if not state.total or len(bar) < _SHORTEST_BAR:
        return as_many_as_fit([*(each.strip() for each in count), cut(state.title, room)], width)
    return f"{title} {bar} {'  '.join(count)}"


def summary(state: RunState, width: int, *, unicode: bool) -> str:
    """What happened, in the line that stays."""
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
    """Name and value; `own_step`: of this step only, evaluations too."""
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
