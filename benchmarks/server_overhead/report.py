"""Bars and the table of `server_overhead`; decides nothing about how numbers are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each bar is a multiple of one call of the bare route in the same run; benchmarks/README.md says
# how they were chosen.
STEP_BAR = 60.0
STEP_CPU_BAR = 40.0
SAMPLE_CPU_BAR = 3.5
MEMORY_BAR = 3.5

Values = dict[str, list[float]]


@dataclass
class Figures:
    """What was measured, by side."""

    step_s: Values = field(default_factory=dict)
    """Every step of `engine` and `served`, and every call of `bare`."""
    step_cpu_ms: Values = field(default_factory=dict)
    """CPU of a step outside the engine, and of a call of `bare`; one value for each round."""
    cpu_ms: Values = field(default_factory=dict)
    """CPU of a sample outside the engine: `engine`, `server`, `client`, and a call of `bare`."""
    wave_s: Values = field(default_factory=dict)
    """Samples that are asked for at once, of `engine` and `served`."""
    resident_mib: dict[str, float] = field(default_factory=dict)
    """Memory of the API process after many futures, `served`, and of the bare server, `bare`."""

    def add(self, one: Mapping[str, Values]) -> None:
        """Take in the values of a round."""
        for kind, sides in one.items():
            known: Values = getattr(self, kind)
            for side, values in sides.items():
                known.setdefault(side, []).extend(values)


@dataclass(frozen=True)
class Row:
    """One line of the table; what the server adds is judged as a multiple of `bare`."""

    title: str
    engine: float
    served: float
    bare: float
    bar: float

    @property
    def ratio(self) -> float:
        """What the server adds to the engine, in calls of the bare route."""
        return (self.served - self.engine) / self.bare

    @property
    def passed(self) -> bool:
        """Whether the ratio stays below its bar."""
        return self.ratio <= self.bar

    def __str__(self) -> str:
        values = (self.engine, self.served, self.served - self.engine, self.bare)
        cells = [f"{value:.3g}" for value in values]
        line = _line(self.title, *cells, f"{self.ratio:.1f}", f"<= {self.bar:g}")
        return f"{line}  {'pass' if self.passed else 'MISS'}"


def rows(found: Figures) -> list[Row]:
    """What is judged."""
    # The fastest: what the work takes when nothing else on the machine disturbs it.
    step = {side: min(values) * 1e3 for side, values in found.step_s.items()}
    step_cpu = {side: median(values) for side, values in found.step_cpu_ms.items()}
    cpu = {side: median(values) for side, values in found.cpu_ms.items()}
    memory = found.resident_mib
    return [
        Row("fastest step, ms", step["engine"], step["served"], step["bare"], STEP_BAR),
        Row(
            "CPU of a step, ms",
            step_cpu["engine"],
            step_cpu["served"],
            step_cpu["bare"],
            STEP_CPU_BAR,
        ),
        Row(
            "CPU of a sample, ms",
            cpu["engine"],
            cpu["server"] + cpu["client"],
            cpu["bare"],
            SAMPLE_CPU_BAR,
        ),
        Row("memory, MiB", 0.0, memory["served"], memory["bare"], MEMORY_BAR),
    ]


def table(found: Figures) -> str:
    """For people; at most 80 columns."""
    server, client = median(found.cpu_ms["server"]), median(found.cpu_ms["client"])
    waves = [f"{median(found.wave_s[side]) * 1e3:.0f}" for side in ("engine", "served")]
    return "\n".join(
        [
            _line("", "engine", "served", "added", "bare", "ratio", "bar"),
            *map(str, rows(found)),
            _line("64 samples at once, ms", *waves),
            f"CPU of a sample: server {server:.2f} ms, client {client:.2f} ms",
        ]
    )


def _line(title: str, *cells: str) -> str:
    return f"{title:24}" + "".join(f"{cell:>8}" for cell in cells)
