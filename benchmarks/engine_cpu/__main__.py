"""`python -m benchmarks.engine_cpu`: the engine next to `transformers` and `peft` on a CPU.

Every side runs in a process of its own, one at a time; rounds alternate between the sides, so
that a busy spell of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Self

from benchmarks.client_cost.processes import ROOT
from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.engine_cpu.report import Row, table
from benchmarks.engine_cpu.workload import QUICK, Workload

if TYPE_CHECKING:
    from types import TracebackType

PACKAGES = ("torch", "transformers", "peft", "numpy")
# How many times as long the peer has to take.
BARS = {"train": 1.2, "adapters": 1.5, "batch": 1.5, "batch_alone": 8.0, "one": 1.3}
# How many times as long strict mode may take as the default.
STRICT_BAR = 1.6


class Side:
    """A process that does the work of one side."""

    def __init__(self, name: str, work: Workload) -> None:
        self.name = name
        argv = [sys.executable, "-m", "benchmarks.engine_cpu.side", name, json.dumps(asdict(work))]
        path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(work.threads)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, kind: str, seed: int) -> dict[str, float]:
        """One round of a kind of work, in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "seed": seed}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended while doing {kind!r}")
        return json.loads(answer)


def rows_of(kind: str, work: Workload) -> list[Row]:
    """What a kind of work is judged by."""
    sampled = work.prompts * work.new_tokens
    trained = work.train_sequences * work.train_tokens
    return {
        "train": [
            Row(
                "train",
                f"LoRA step, {work.train_sequences}x{work.train_tokens}",
                trained,
                BARS["train"],
            ),
            Row("train_strict", "  strict / default", trained, STRICT_BAR, "share", "default"),
        ],
        "adapters": [
            Row(
                "adapters",
                f"{work.adapters} adapters x {work.adapter_tokens}",
                work.adapters * work.adapter_tokens,
                BARS["adapters"],
            )
        ],
        "batch": [
            Row(
                "batch",
                f"sample {work.prompts}x{work.new_tokens} / padded",
                sampled,
                BARS["batch"],
            ),
            Row(
                "batch_alone",
                f"sample {work.prompts}x{work.new_tokens} / one by one",
                sampled,
                BARS["batch_alone"],
            ),
            Row("batch_strict", "  strict / default", sampled, STRICT_BAR, "share", "default"),
        ],
        "one": [Row("one", f"sample 1x{work.new_tokens}", work.new_tokens, BARS["one"])],
    }[kind]


def measure(kind: str, sides: dict[str, Side], work: Workload) -> list[Row]:
    """All rounds of one kind of work, after those that do not count."""
    rows = rows_of(kind, work)
    for seed in range(work.warm_up + work.rounds):
        print(f"{kind}: round {seed}", file=sys.stderr)
        taken: dict[str, dict[str, float]] = {}
        order = list(sides) if seed % 2 else list(sides)[::-1]
        for name in order:
            if name != "strict" or any(row.kind == "share" for row in rows):
                taken[name] = sides[name].run(kind, seed)
        if kind == "batch":
            taken["alone"] = sides["peer"].run("alone", seed)
        if seed >= work.warm_up:
            _note(rows, taken, work)
    return rows


def _note(rows: list[Row], taken: dict[str, dict[str, float]], work: Workload) -> None:
    for row in rows:
        if row.kind == "share":
            row.add("tinkex", taken["strict"])
            row.add("default", taken["tinkex"])
        else:
            row.add("tinkex", taken["tinkex"])
            if row.name == "batch_alone":
                row.add("peer", taken["alone"], work.prompts / work.alone_prompts)
            else:
                row.add("peer", taken["peer"])


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_cpu", description=__doc__)
    kinds = ("train", "adapters", "batch", "one")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--only", choices=kinds, action="append", help="may be repeated")
    parser.add_argument("--threads", type=int, help="of each side (default: one for each core)")
    args = parser.parse_args()
    work = QUICK if args.quick else Workload()
    if args.threads:
        work = replace(work, threads=args.threads)
    with ExitStack() as stack:
        names = ("peer", "tinkex", "strict")
        sides = {name: stack.enter_context(Side(name, work)) for name in names}
        rows = [row for kind in args.only or kinds for row in measure(kind, sides, work)]
    print(table(rows))
    print(f"measured on {machine()}, {work.threads} threads")
    about = {
        "benchmark": "engine_cpu",
        "commit": commit(),
        "versions": {name: version(name) for name in PACKAGES},
        "hardware": hardware(),
        "workload": asdict(work),
        "results": {row.name: row.as_json() for row in rows},
        "passed": all(row.passed() is not False for row in rows),
    }
    print(json.dumps(about))
    return 0 if about["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
