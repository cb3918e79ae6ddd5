"""`python -m benchmarks.server_overhead`: what HTTP, the journal and tenants add to the engine.

The same steps and samples once asked of the engine's process directly and once through
`tinkex serve` with our client; then a crowd, and the memory of many finished futures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.client_cost.setting import commit, hardware
from benchmarks.server_overhead import direct, served
from benchmarks.server_overhead.work import MODEL, Size
from benchmarks.serving import serving

STEP_BAR_MS = 15.0
SAMPLE_BAR_MS = 1.5
MEMORY_BAR_MIB = 200.0


def line(title: str, *cells: str) -> str:
    """One row of the table."""
    return f"{title:30}" + "".join(f"{cell:>12}" for cell in cells)


def judged(value: float, bar: float) -> str:
    """Whether a figure stays below its bar."""
    return "pass" if value <= bar else "MISS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crowd-s", type=float, default=60.0, help="length of the crowd")
    options = parser.parse_args()
    size = Size(crowd_s=options.crowd_s)
    alone = asyncio.run(direct.measure(size))
    with tempfile.TemporaryDirectory() as name, serving(Path(name), MODEL) as server:
        http = served.measure(server, size)
        crowd = asyncio.run(served.crowd(server, size))
        resident = served.memory(server, size)
    step_ms = (http.step_s - alone.step_s) * 1e3
    sample_ms = http.cpu_ms - alone.cpu_ms
    print(line("", "engine", "served", "added", "bar"))
    print(
        line(
            "step, ms",
            f"{alone.step_s * 1e3:.1f}",
            f"{http.step_s * 1e3:.1f}",
            f"{step_ms:.1f}",
            f"<= {STEP_BAR_MS:g}",
            judged(step_ms, STEP_BAR_MS),
        )
    )
    print(
        line(
            "CPU of a sample, ms",
            f"{alone.cpu_ms:.2f}",
            f"{http.cpu_ms:.2f}",
            f"{sample_ms:.2f}",
            f"<= {SAMPLE_BAR_MS:g}",
            judged(sample_ms, SAMPLE_BAR_MS),
        )
    )
    print(
        line("  of which server, client", f"{http.server_cpu_ms:.2f}", f"{http.caller_cpu_ms:.2f}")
    )
    print(
        line(
            "64 samples at once, ms", f"{alone.samples_s * 1e3:.0f}", f"{http.samples_s * 1e3:.0f}"
        )
    )
    print(
        line(
            "memory, 10,000 futures, MiB",
            "",
            f"{resident:.0f}",
            "",
            f"<= {MEMORY_BAR_MIB:g}",
            judged(resident, MEMORY_BAR_MIB),
        )
    )
    print(
        f"crowd: {crowd['samples']:.0f} samples ({size.crowd_samples} in flight), "
        f"{crowd['heartbeats']:.0f} heartbeats, {crowd['late']:.0f} late, "
        f"slowest {crowd['slowest_s']:.2f} s, {crowd['errors']:.0f} errors"
    )
    results = {"direct": asdict(alone), "served": asdict(http), "crowd": crowd}
    about = {"benchmark": "server_overhead", "commit": commit(), "hardware": hardware()}
    print(json.dumps({**about, "size": asdict(size), **results, "resident_mib": resident}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
