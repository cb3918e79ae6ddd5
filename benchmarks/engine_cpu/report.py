"""Bars, the table and the JSON line; decides nothing about how numbers are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTHS = (31, 15, 15, 8, 8, 6)


@dataclass
class Row:
    """One kind of work, measured on both sides; seconds of each round."""

    name: str
    title: str
    tokens: int
    bar: float
    kind: Literal["times", "share"] = "times"
    """`times`: the peer takes at least so many times as long. `share`: we take at most so many
    times as long as the other side."""
    other: str = "peer"
    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, seconds: Mapping[str, float], scale: float = 1.0) -> None:
        """Note one round."""
        self.wall.setdefault(side, []).append(seconds["wall_s"] * scale)
        self.cpu.setdefault(side, []).append(seconds["cpu_s"] * scale)

    def ratio(self, values: Mapping[str, list[float]]) -> float | None:
        """The number the bar is about: of the medians of all rounds."""
        if not values.get("tinkex") or not values.get(self.other):
            return None
        ours, theirs = median(values["tinkex"]), median(values[self.other])
        return theirs / ours if self.kind == "times" else ours / theirs

    def passed(self) -> bool | None:
        """Whether the bar is reached; None when a side is missing."""
        found = self.ratio(self.wall)
        if found is None:
            return None
        return found >= self.bar if self.kind == "times" else found <= self.bar

    def cell(self, side: str) -> str:
        """`312 tok/s ±4%`: median, and half the distance from slowest to fastest round."""
        values = self.wall.get(side)
        if not values:
            return "-"
        middle = median(values)
        spread = (max(values) - min(values)) / 2 / middle
        return f"{self.tokens / middle:.0f} tok/s ±{spread:.0%}"

    def as_json(self) -> dict[str, object]:
        """Everything about this row for the JSON line."""
        return {
            "tokens": self.tokens,
            "wall_s": {side: [round(v, 4) for v in found] for side, found in self.wall.items()},
            "cpu_s": {side: [round(v, 4) for v in found] for side, found in self.cpu.items()},
            "ratio": self.ratio(self.wall),
            "cpu_ratio": self.ratio(self.cpu),
            "bar": self.bar_text(),
            "passed": self.passed(),
        }

    def bar_text(self) -> str:
        """The bar as the table shows it."""
        return f"{'>=' if self.kind == 'times' else '<='} {self.bar:g}"


def _line(cells: Sequence[str]) -> str:
    first, *rest = cells
    aligned = [cell.rjust(width) for cell, width in zip(rest, WIDTHS[1:], strict=True)]
    return "".join((first.ljust(WIDTHS[0]), *aligned)).rstrip()


def table(rows: Sequence[Row]) -> str:
    """The table for people."""
    verdicts = {True: "pass", False: "MISS", None: ""}
    lines = [_line(("", "other", "tinkex", "ratio", "bar", "")), "-" * sum(WIDTHS)]
    for row in rows:
        ratio, cpu = row.ratio(row.wall), row.ratio(row.cpu)
        lines.append(
            _line(
                (
                    row.title,
                    row.cell(row.other),
                    row.cell("tinkex"),
                    "" if ratio is None else f"{ratio:.2f}",
                    row.bar_text(),
                    verdicts[row.passed()],
                )
            )
        )
        lines.append(_line(("  by CPU time", "", "", "" if cpu is None else f"{cpu:.2f}", "", "")))
    return "\n".join(lines)
