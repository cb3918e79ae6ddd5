"""From a run's rows to lines that can be drawn: one series of (step, value) per metric.

A name may carry whose it is, as in `first run: eval_loss`; what is drawn where follows from the
part after the colon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import InputError
from tinkex.tracking.numbers import drawable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Points = list[tuple[float, float]]

EVAL = "eval_"
# What a run is looked at for, best first; the evaluation of each comes along.
_USUAL = ("loss", "reward", "accuracy", "margin")
_NOT_PLOTTED = frozenset({"step", "time_s"})


def series_of(
    rows: Sequence[Mapping[str, float]], metrics: Sequence[str] = (), label: str = ""
) -> dict[str, Points]:
    """The metrics asked for, each where it has a value; without any, what one usually wants to see.

    `label` is put before each name. Raises InputError naming those there are when one is missing.
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
    """A run's own measure with its evaluation; failing that, the first number there is."""
    usual = [name for name in _USUAL if name in there or EVAL + name in there]
    shown = [each for name in usual for each in (name, EVAL + name) if each in there]
    return shown or list(there[:1])


def metric_of(name: str) -> str:
    """The metric behind a series' name, without whose it is."""
    return name.rpartition(": ")[2]


def label_of(name: str) -> str:
    """Whose the series is; empty where its name does not say."""
    return name.rpartition(": ")[0]


def panel_of(name: str) -> str:
    """What the value axis shows: an evaluation stands with what it evaluates."""
    return metric_of(name).removeprefix(EVAL)


def by_panel(series: Mapping[str, Points]) -> dict[str, dict[str, Points]]:
    """The series that share a value axis together: a loss and a reward have no scale in common."""
    panels: dict[str, dict[str, Points]] = {}
    for name, points in series.items():
        panels.setdefault(panel_of(name), {})[name] = points
    return panels


def is_evaluation(name: str) -> bool:
    """Whether it is measured now and then, so that its points are worth marking."""
    return metric_of(name).startswith(EVAL)


def finite(points: Sequence[tuple[float, float]]) -> Points:
    """Those that can be drawn."""
    return [(x, y) for x, y in points if drawable(x) and drawable(y)]


def smoothed(points: Sequence[tuple[float, float]], share: float = 0.05) -> Points:
    """A mean over about `share` of the points to either side.

    It narrows towards the beginning, where a run falls steeply; at the end it looks back only.
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
