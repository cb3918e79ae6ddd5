"""Bars and the table of `forwarding`; decides nothing about how numbers are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

ADDED_BAR_MS = 1.0


@dataclass
class Row:
    """One kind of request: CPU of the node that got it, in milliseconds, round by round."""

    title: str
    small: bool
    """Whether the bar is about it; the CPU of a large body is mostly that of copying it."""
    here: list[float] = field(default_factory=list)
    there: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """What passing it on costs more than answering it."""
        return median(b - a for a, b in zip(self.here, self.there, strict=True))

    @property
    def passed(self) -> bool:
        """Whether that stays within the bar, if there is one."""
        return not self.small or self.added <= ADDED_BAR_MS

    def __str__(self) -> str:
        cells = [f"{median(self.here):.3f}", f"{median(self.there):.3f}", f"{self.added:.3f}"]
        if not self.small:
            return _line(self.title, *cells)
        verdict = "pass" if self.passed else "MISS"
        return f"{_line(self.title, *cells, f'<= {ADDED_BAR_MS:g}')}  {verdict}"


def table(rows: list[Row]) -> str:
    """For people; at most 80 columns."""
    head = _line("CPU of the node, ms", "answered", "passed on", "added", "bar")
    return "\n".join([head, *map(str, rows)])


def _line(title: str, *cells: str) -> str:
    return f"{title:28}" + "".join(f"{cell:>11}" for cell in cells)
