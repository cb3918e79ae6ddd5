"""`python -m benchmarks.client_cost`: both SDKs, one stub server, a table and a JSON line.

Bars on CPU time are ratios official / tinkex. Each number comes from a fresh process; rounds
alternate between the two sides, so that a busy spell of the machine falls on both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.client_cost.processes import MeasureError, Sdk, command_cpu_ms, run_workload
from benchmarks.client_cost.report import Bar, Row, as_json, table
from benchmarks.client_cost.setting import both_sides, commit, hardware, machine, versions

NAMES = ("ServiceClient", "Datum", "AdamParams", "SamplingParams", "ModelInput")


@dataclass(frozen=True)
class Workload:
    """Sizes of everything that is run; part of the JSON line."""

    prompt_tokens: int = 128
    sample_tokens: int = 64
    in_flight: int = 1000
    sample_calls: int = 4000
    datums: int = 64
    datum_tokens: int = 1024
    train_calls: int = 40
    whole_run_samples: int = 2000
    whole_run_train_calls: int = 10
    beats_in_flight: int = 2000
    beats_waves: int = 2
    # Long enough that even a slow client has all its calls in flight before the first one ends.
    sample_delay_s: float = 3.0
    beats_delay_s: float = 15.0
    train_delay_s: float = 0.05
    rounds: int = 3
    start_rounds: int = 10

    def options(self, **given: int) -> dict[str, int]:
        """The sizes a measured process needs to know."""
        shared = ("prompt_tokens", "sample_tokens", "in_flight", "datums", "datum_tokens")
        return {name: getattr(self, name) for name in shared} | given

    def flags(self, sample_delay_s: float) -> dict[str, float]:
        """The stub's command line."""
        return {
            "sample-delay": sample_delay_s,
            "train-delay": self.train_delay_s,
            "sample-tokens": self.sample_tokens,
            "datums": self.datums,
            "datum-tokens": self.datum_tokens,
        }


QUICK = Workload(
    sample_calls=1000,
    train_calls=10,
    whole_run_train_calls=5,
    beats_waves=1,
    rounds=1,
    start_rounds=3,
)

Measured = dict[str, float]
Measurement = Callable[[Sdk, Workload], Measured]


def sample(kind: str) -> Measurement:
    """CPU and wall time of one sample call, and how many the stub had open at most."""

    def measure(sdk: Sdk, work: Workload) -> Measured:
        options = work.options(calls=work.sample_calls)
        out, seen = run_workload(sdk, kind, options, work.flags(work.sample_delay_s))
        return {
            kind: out["cpu_us"] / 1e3,
            f"{kind}_wall": out["wall_us"] / 1e3,
            f"{kind}_in_flight": seen["peak_in_flight"],
        }

    return measure


def train(sdk: Sdk, work: Workload) -> Measured:
    """CPU time of one `forward_backward`, and of making its datums."""
    options, flags = work.options(calls=work.train_calls), work.flags(work.sample_delay_s)
    call, _ = run_workload(sdk, "forward_backward", options, flags)
    build, _ = run_workload(sdk, "build_datums", options, flags)
    return {
        "forward_backward": call["cpu_us"] / 1e3,
        "forward_backward_wall": call["wall_us"] / 1e3,
        "build_datums": build["cpu_us"] / 1e3,
    }


def memory(sdk: Sdk, work: Workload) -> Measured:
    """Peak resident memory of a process that samples and trains."""
    options = work.options(calls=work.whole_run_train_calls, samples=work.whole_run_samples)
    out, _ = run_workload(sdk, "whole_run", options, work.flags(work.sample_delay_s))
    return {"peak_memory": out["peak_mib"]}


def start(sdk: Sdk, _: Workload) -> Measured:
    """CPU time of starting: the import less a bare interpreter, and the whole of `--help`."""
    bare = command_cpu_ms(sdk, "-c", "pass")
    names = ", ".join(f"sdk.{name}" for name in NAMES)
    imported = command_cpu_ms(sdk, "-c", f"import {sdk.module}")
    touched = command_cpu_ms(sdk, "-c", f"import {sdk.module} as sdk; {names}")
    return {"import": imported - bare, "import_names": touched - bare}


def help_page(sdk: Sdk, _: Workload) -> Measured:
    """CPU time of the command line's `--help`."""
    bare = command_cpu_ms(sdk, "-c", "pass")
    whole = command_cpu_ms(sdk, "-m", f"{sdk.module}.cli", "--help")
    return {"help": whole, "help_less_python": whole - bare}


def heartbeats(sdk: Sdk, work: Workload) -> Measured:
    """The longest time without a heartbeat while thousands of samples were in flight."""
    calls = work.beats_in_flight * work.beats_waves
    options = work.options(calls=calls) | {"in_flight": work.beats_in_flight}
    _, seen = run_workload(sdk, "many_in_flight", options, work.flags(work.beats_delay_s))
    return {"heartbeat": silence_s(seen)}


def silence_s(seen: dict[str, Any]) -> float:
    """The longest time between two heartbeats of a session, which are due every 10 s."""
    moments = [0.0, *seen["heartbeats"], seen["session_s"]]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


MEASUREMENTS: dict[str, tuple[Measurement, tuple[Row, ...]]] = {
    "sample": (
        sample("sample_async"),
        (
            Row("sample_async", "sample_async, CPU/call", "ms", Bar("times", 8)),
            Row("sample_async_wall", "  wall/call", "ms"),
            Row("sample_async_in_flight", "  most in flight", ""),
        ),
    ),
    "blocking": (
        sample("sample_blocking"),
        (
            Row("sample_blocking", "sample().result(), CPU", "ms", Bar("times", 8)),
            Row("sample_blocking_wall", "  wall/call", "ms"),
            Row("sample_blocking_in_flight", "  most in flight", ""),
        ),
    ),
    "train": (
        train,
        (
            Row("forward_backward", "forward_backward, CPU", "ms", Bar("times", 2)),
            Row("forward_backward_wall", "  wall/call", "ms"),
            Row("build_datums", "  making its datums, CPU", "ms"),
        ),
    ),
    "import": (
        start,
        (
            Row("import", "import, CPU", "ms", Bar("times", 3)),
            Row("import_names", "  and touching 5 names", "ms", Bar("times", 3)),
        ),
    ),
    "help": (
        help_page,
        (
            Row("help", "--help, CPU", "ms", Bar("times", 6)),
            Row("help_less_python", "  less python -c pass", "ms"),
        ),
    ),
    "memory": (
        memory,
        (Row("peak_memory", "peak memory, whole run", "MiB", Bar("share", 0.6)),),
    ),
    "heartbeat": (
        heartbeats,
        (Row("heartbeat", "silence, 2000 open", "s", Bar("share", 1.05)),),
    ),
}


def rounds_of(name: str, work: Workload) -> int:
    """Short measurements are repeated more often; the long wait is done once."""
    return {"import": work.start_rounds, "help": work.start_rounds, "heartbeat": 1}.get(
        name, work.rounds
    )


def measure(name: str, sides: Sequence[Sdk], work: Workload) -> tuple[Row, ...]:
    """All rounds of one measurement; a side that fails is not tried again."""
    take, rows = MEASUREMENTS[name]
    if name in ("import", "help"):
        attempt(take, rows, sides, work, keep=False)  # the first run writes the .pyc files
    for i in range(rounds_of(name, work)):
        print(f"{name}: round {i + 1}", file=sys.stderr)
        attempt(take, rows, sides if i % 2 == 0 else sides[::-1], work, keep=True)
    return rows


def attempt(
    take: Measurement, rows: Sequence[Row], sides: Sequence[Sdk], work: Workload, *, keep: bool
) -> None:
    """One round on each side, added to the rows."""
    for sdk in sides:
        if sdk.label in rows[0].errors:
            continue
        try:
            values = take(sdk, work)
        except MeasureError as error:
            for row in rows:
                row.errors[sdk.label] = str(error)
            continue
        for row in rows if keep else ():
            row.values[sdk.label].append(values[row.name])


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.client_cost", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer calls, one round")
    parser.add_argument("--official-python", help="an interpreter that has the official SDK")
    parser.add_argument("--sdk", choices=("official", "tinkex"), help="measure one side only")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="may be repeated")
    args = parser.parse_args()
    work = QUICK if args.quick else Workload()
    sides = both_sides(args.official_python, args.sdk)
    try:
        packages = {sdk.label: versions(sdk) for sdk in sides}
    except MeasureError as error:
        parser.error(str(error))
    about = {
        "commit": commit(),
        "versions": packages,
        "hardware": hardware(),
        "workload": asdict(work),
    }
    rows = [row for name in args.only or MEASUREMENTS for row in measure(name, sides, work)]
    result = as_json(rows, about)
    print(table(rows))
    print(f"measured on {machine()}")
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
