"""Bars, the table and the JSON line; decides nothing about how numbers are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTHS = (26, 15, 15, 8, 8, 6)


@dataclass(frozen=True)
class Bar:
    """What tinkex has to reach: `official / tinkex` (times) or `tinkex / official` (share)."""

    kind: Literal["times", "share"]
    value: float

    def __str__(self) -> str:
        return f"{'>=' if self.kind == 'times' else '<='} {self.value:g}"

    def met(self, official: float | None, tinkex: float) -> bool | None:
        """Whether it is reached; None when the other side is missing."""
        if official is None:
            return None
        if self.kind == "times":
            return official >= self.value * tinkex
        return tinkex <= self.value * official


@dataclass
class Row:
    """One measurement of both sides; `values` grow with each round."""

    name: str
    title: str
    unit: str
    bar: Bar | None = None
    values: dict[str, list[float]] = field(default_factory=lambda: {"official": [], "tinkex": []})
    errors: dict[str, str] = field(default_factory=dict)

    def middle(self, label: str) -> float | None:
        """The median of one side, or None when it has no value."""
        values = self.values[label]
        return median(values) if values and label not in self.errors else None

    def ratio(self) -> float | None:
        """The number the bar is about, when both sides have one."""
        official, tinkex = self.middle("official"), self.middle("tinkex")
        if official is None or tinkex is None:
            return None
        above, below = (official, tinkex)
        if self.bar and self.bar.kind == "share":
            above, below = below, above
        return above / below if below else None

    def passed(self) -> bool | None:
        """True or False when there is a bar to judge, else None."""
        if self.bar is None:
            return None
        if "tinkex" in self.errors:
            return False
        tinkex = self.middle("tinkex")
        return None if tinkex is None else self.bar.met(self.middle("official"), tinkex)

    def cell(self, label: str) -> str:
        """`3.08 ms ±4%`: median, and the distance from lowest to highest around it."""
        if label in self.errors:
            return "failed"
        middle = self.middle(label)
        if middle is None:
            return "-"
        values = self.values[label]
        text = f"{middle:#.3g}".rstrip(".") if middle < 1000 else f"{middle:.0f}"
        parts = [text, self.unit]
        if len(values) > 1 and middle:
            spread = (max(values) - min(values)) / 2 / middle
            # Next to nothing can vary by many times itself; the digits would say nothing.
            parts.append(f"±{spread:.0%}" if spread < 1 else "±>99%")
        return " ".join(part for part in parts if part)

    def as_json(self) -> dict[str, object]:
        """Everything about this row for the JSON line."""
        sides = {
            label: {"median": self.middle(label), "values": [round(v, 4) for v in values]}
            for label, values in self.values.items()
            if values
        }
        return {
            "unit": self.unit,
            **sides,
            "ratio": self.ratio(),
            "bar": str(self.bar) if self.bar else None,
            "passed": self.passed(),
            **({"errors": self.errors} if self.errors else {}),
        }


def line(cells: Sequence[str]) -> str:
    """One table line: the first cell to the left, the others to the right."""
    first, *rest = cells
    aligned = [cell.rjust(width) for cell, width in zip(rest, WIDTHS[1:], strict=True)]
    return "".join((first.ljust(WIDTHS[0]), *aligned)).rstrip()


def table(rows: Sequence[Row]) -> str:
    """The table for people, at most 80 columns wide."""
    verdicts = {True: "pass", False: "MISS", None: ""}
    lines = [line(("", "official", "tinkex", "ratio", "bar", "")), "-" * sum(WIDTHS)]
    for row in rows:
        ratio = row.ratio()
        lines.append(
            line(
                (
                    row.title,
                    row.cell("official"),
                    row.cell("tinkex"),
                    "" if ratio is None else f"{ratio:.2f}" if ratio < 100 else ">100",
                    str(row.bar) if row.bar else "",
                    verdicts[row.passed()],
                )
            )
        )
    lines += dict.fromkeys(
        f"{label}: {error.splitlines()[-1]}"[: sum(WIDTHS)]
        for row in rows
        for label, error in row.errors.items()
    )
    return "\n".join(lines)


def as_json(rows: Sequence[Row], about: Mapping[str, object]) -> dict[str, object]:
    """The JSON line for machines."""
    return {
        "benchmark": "client_cost",
        **about,
        "results": {row.name: row.as_json() for row in rows},
        "passed": all(row.passed() is not False for row in rows),
    }
