"""A run's rows as series to plot: (step, value) pairs of each metric.

The name of a series may begin with a label of its run, as in `first run: eval_loss`; the part after
the colon decides where it is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Points = list[tuple[float, float]]

EVAL = "eval_"
# The usual metrics of a run, most important first; each is shown with its evaluation.
_USUAL = ("loss", "reward", "accuracy", "margin")
_NOT_PLOTTED = frozenset({"step", "time_s"})
# Beyond it the difference of two numbers may overflow.
_LARGEST = 1e300


def series_of(
    rows: Sequence[Mapping[str, float]], metrics: Sequence[str] = (), label: str = ""
) -> dict[str, Points]:
    """The series of the given metrics; by default, the usual metrics of a run.

    `label` is put before each name. Raises InputError with the known names for an unknown metric.
    """
    there = list(dict.fromkeys(name for row in rows for name in row if name not in _NOT_PLOTTED))
    for name in metrics:
        if name not in there:
            raise InputError(f"there is no metric {name!r}; there are {', '.join(there) or 'none'}")
    return {
        f"{label}: {name}" if label else name: [
            (row["step"], row[name]) for row in rows if name in row
        ]
        for name in metrics or _usual(there)
    }


def _usual(there: Sequence[str]) -> list[str]:
    """The usual metrics with their evaluations; without them, the first metric."""
    usual = [name for name in _USUAL if name in there or EVAL + name in there]
    shown = [each for name in usual for each in (name, EVAL + name) if each in there]
    return shown or list(there[:1])


def metric_of(name: str) -> str:
    """The metric of a series, without its label."""
    return name.rpartition(": ")[2]


def label_of(name: str) -> str:
    """The label of a series; empty without one."""
    return name.rpartition(": ")[0]


def panel_of(name: str) -> str:
    """The panel of a series: an evaluation shares it with the metric that it evaluates."""
    return metric_of(name).removeprefix(EVAL)


def by_panel(series: Mapping[str, Points]) -> dict[str, dict[str, Points]]:
    """The series grouped by value axis: a loss and a reward have no common scale."""
    panels: dict[str, dict[str, Points]] = {}
    for name, points in series.items():
        panels.setdefault(panel_of(name), {})[name] = points
    return panels


def is_evaluation(name: str) -> bool:
    """Whether it is measured rarely, so that its points are marked."""
    return metric_of(name).startswith(EVAL)


def drawable(value: float) -> bool:
    """Whether the number has a place on an axis."""
    return abs(value) <= _LARGEST  # false for NaN


def finite(points: Sequence[tuple[float, float]]) -> Points:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if drawable(x) and drawable(y)]


def smoothed(points: Sequence[tuple[float, float]], share: float = 0.05) -> Points:
    """A moving average over about `share` of the points to either side.

    The window narrows towards the beginning, where a loss falls steeply; at the end it covers
    earlier points only.
    """
    reach = round(len(points) * share)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    result: Points = []
    for at, (x, _) in enumerate(points):
        back = min(reach, at)
        ahead = min(back, len(points) - 1 - at)
        result.append((x, (sums[at + ahead + 1] - sums[at - back]) / (back + ahead + 1)))
    return result
