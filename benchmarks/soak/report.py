"""Lines, table, picture and verdict of a soak."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.soak.readings import LEDGER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from benchmarks.soak.readings import Process, Reading

    Latency = tuple[str, float, float]

# Memory grows while a process warms up: imports, caches, the allocator's pools.
WARM_UP_S = 120.0


@dataclass(frozen=True)
class Resource:
    """A line that must be flat: it may grow by `share` of its median or by `least`."""

    name: str
    value: Callable[[Reading], float | None]
    life: Callable[[Reading], object]
    """What the line starts anew with: a process."""
    least: float
    share: float


@dataclass(frozen=True)
class Flatness:
    """How much a line grew in the judged time, by its least-squares slope."""

    name: str
    start: float
    end: float
    lowest: float
    highest: float
    growth: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed


def _of_process(name: str) -> list[Resource]:
    def process(reading: Reading) -> Process | None:
        return getattr(reading, name)

    def pid(reading: Reading) -> object:
        found = process(reading)
        return None if found is None else found.pid

    def field(what: str) -> Callable[[Reading], float | None]:
        return lambda reading: getattr(process(reading), what, None)

    def own_descriptors(reading: Reading) -> float | None:
        """Those besides clients' connections, whose number depends on how long answers take."""
        found, clients = process(reading), reading.metrics.get("tinkex_connections_open")
        if found is None or (name == "server" and clients is None):
            return None
        return found.descriptors - (clients or 0.0 if name == "server" else 0.0)

    return [
        Resource(f"{name}: memory_mib", field("memory_mib"), pid, 12.0, 0.05),
        Resource(f"{name}: threads", field("threads"), pid, 2.0, 0.0),
        Resource(f"{name}: descriptors", own_descriptors, pid, 8.0, 0.0),
    ]


def resources(tables: Iterable[str]) -> list[Resource]:
    """Every line that is judged."""

    def always(_: Reading) -> object:
        return "one"

    def rows(table: str) -> Callable[[Reading], float | None]:
        return lambda reading: reading.rows.get(table)

    def working_mib(reading: Reading) -> float | None:
        return None if reading.ledger_mib is None else reading.database_mib - reading.ledger_mib

    found = [each for name in ("server", "engine") for each in _of_process(name)]
    for table in tables:
        if table not in LEDGER:
            found.append(Resource(f"{table}: rows", rows(table), always, 100.0, 0.25))
    found.append(Resource("without ledger: database_mib", working_mib, always, 1.0, 0.1))
    found.append(Resource("data folder: files", lambda r: r.files, always, 12.0, 0.1))
    return found


def judge(resource: Resource, readings: Sequence[Reading], warm_up_s: float) -> Flatness | None:
    """The growth over the last two thirds; None where there are too few readings.

    A process that was killed starts a new line: all lines share one slope, each has its own level.
    """
    points = [
        (resource.life(r), r.at, value)
        for r in readings
        if (value := resource.value(r)) is not None
    ]
    if not points:
        return None
    first, last = points[0][1], points[-1][1]
    begun: dict[object, float] = {}
    for life, at, _ in points:
        begun.setdefault(life, at)
    whole = len(begun) == 1
    window = (last - first) * 2 / 3
    late = [
        point
        for point in points
        if point[1] >= last - window and (whole or point[1] - begun[point[0]] >= warm_up_s)
    ]
    if len(late) < 3:
        return None
    values = [value for _, _, value in late]
    middle = median(values)
    return Flatness(
        resource.name,
        late[0][2],
        late[-1][2],
        min(values),
        max(values),
        _slope(late) * window,
        max(resource.least, resource.share * middle),
    )


def _slope(points: Sequence[tuple[object, float, float]]) -> float:
    """Least squares within the lives."""
    above = below = 0.0
    for life in {point[0] for point in points}:
        own = [(at, value) for key, at, value in points if key == life]
        mean_at = sum(at for at, _ in own) / len(own)
        mean = sum(value for _, value in own) / len(own)
        above += sum((at - mean_at) * (value - mean) for at, value in own)
        below += sum((at - mean_at) ** 2 for at, _ in own)
    return above / below if below else 0.0


HEAD = (
    "  min api MiB eng MiB     thr     fds    rows  ledger  db MiB  files  calls  p50 ms  p95 ms"
    "   worst blocks"
)


def line(reading: Reading, calls: Sequence[Latency]) -> str:
    """One interval in numbers."""
    rows = sum(count for table, count in reading.rows.items() if table not in LEDGER)
    ledger = sum(count for table, count in reading.rows.items() if table in LEDGER)
    times = sorted(1e3 * (ended - began) for _, began, ended in calls)
    blocks = reading.metrics.get("tinkex_loop_blocks_total")
    two = lambda what: "/".join(  # noqa: E731
        "-" if p is None else str(getattr(p, what)) for p in (reading.server, reading.engine)
    )
    memory = ["-" if p is None else f"{p.memory_mib:.0f}" for p in (reading.server, reading.engine)]
    return (
        f"{reading.at / 60:5.1f} {memory[0]:>7} {memory[1]:>7} {two('threads'):>7} "
        f"{two('descriptors'):>7} {rows:7} {ledger:7} {reading.database_mib:7.1f} "
        f"{reading.files:6} {len(times):6} {at_share(times, 0.5):7.0f} "
        f"{at_share(times, 0.95):7.0f} {at_share(times, 1.0):7.0f} "
        f"{'-' if blocks is None else f'{blocks:.0f}':>6}"
    )


def at_share(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def latency_table(calls: Sequence[Latency], disturbed: Callable[[float, float], bool]) -> str:
    """Milliseconds of each kind of call; the last column includes those that met a kill."""
    head = f"{'call':<20} {'calls':>7} {'p50 ms':>8} {'p95 ms':>8} {'worst':>8} {'with kills':>11}"
    rows = [head]
    for kind in sorted({kind for kind, _, _ in calls}):
        own = [call for call in calls if call[0] == kind]
        calm = sorted(1e3 * (e - b) for _, b, e in own if not disturbed(b, e))
        worst = max(1e3 * (e - b) for _, b, e in own)
        rows.append(
            f"{kind:<20} {len(own):7} {at_share(calm, 0.5):8.1f} {at_share(calm, 0.95):8.1f} "
            f"{at_share(calm, 1.0):8.0f} {worst:11.0f}"
        )
    return "\n".join(rows)


def flatness_table(found: Sequence[Flatness]) -> str:
    """Every judged line, over the last two thirds of the time."""
    rows = [f"{'line':<30}    first     last   lowest  highest   growth  allowed"]
    rows += [
        f"{f.name:<30} {f.start:8.1f} {f.end:8.1f} {f.lowest:8.1f} {f.highest:8.1f} "
        f"{f.growth:+8.1f} {f.allowed:8.1f}  {'flat' if f.flat else 'GROWS'}"
        for f in found
    ]
    return "\n".join(rows)


def draw(readings: Sequence[Reading], latencies: Sequence[Sequence[Latency]], path: Path) -> None:
    """The lines over time, as SVG."""
    from tinkex.tracking.figure import write_picture

    tables = [name for name in readings[-1].rows if name not in LEDGER]
    series: dict[str, list[tuple[float, float]]] = {}

    def add(name: str, at: float, value: float | None) -> None:
        if value is not None:
            series.setdefault(name, []).append((at / 60, value))

    for resource in resources(tables):
        for reading in readings:
            add(resource.name, reading.at, resource.value(reading))
    for reading, calls in zip(readings, latencies, strict=True):
        for kind in ("sample", "forward_backward", "list"):
            own = sorted(1e3 * (e - b) for name, b, e in calls if name == kind)
            if own:
                add(f"{kind}: p95_ms", reading.at, at_share(own, 0.95))
    write_picture(series, path, title="Soak: three tenants' work with kills", x_label="minute")
