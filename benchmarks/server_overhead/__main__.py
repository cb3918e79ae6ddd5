"""`python -m benchmarks.server_overhead`: what HTTP, the journal and tenants add to the engine.

The same steps and samples are asked of the engine's process directly and through `tinkex serve`
with our client. Beside them runs a bare Starlette route that stores one row in SQLite; what the
server adds is judged as a multiple of one call of that route. The rounds of the three alternate.
Then come many samples at once beside many sessions, and the memory of many finished futures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.server_overhead import bare, direct, served
from benchmarks.server_overhead.report import Figures, rows, table
from benchmarks.server_overhead.work import MODEL, Size, sample_body, step_body
from benchmarks.serving import Server, serving


def measure(size: Size, folder: Path, server: Server, floor: Server) -> Figures:
    """All rounds of steps and samples; each side has its turn in each of them."""
    found = Figures()
    plain = bare.Bare(floor)
    with direct.opened(folder / "engine", size) as engine, served.opened(server, size) as client:
        for number in range(size.rounds):
            print(f"round {number}", file=sys.stderr)
            one = _round(size, engine, client, plain)
            if number > 0:
                found.add(one)
    return found


def _round(
    size: Size, engine: direct.Direct, client: served.Served, plain: bare.Bare
) -> dict[str, dict[str, list[float]]]:
    engine_steps, engine_step_cpu = engine.steps(size.steps)
    served_steps, served_step_cpu = client.steps(size.steps)
    bare_calls, bare_call_cpu = plain.in_turn(step_body(), size.bare_calls)
    engine_wave, engine_cpu = engine.waves(size.waves)
    served_wave, server_cpu, client_cpu = client.waves(size.waves)
    bare_cpu = plain.at_once(sample_body(), size.bare_calls * size.waves, size.at_once)
    return {
        "step_s": {"engine": engine_steps, "served": served_steps, "bare": bare_calls},
        "step_cpu_ms": {
            "engine": [engine_step_cpu],
            "served": [served_step_cpu],
            "bare": [bare_call_cpu],
        },
        "wave_s": {"engine": [engine_wave], "served": [served_wave]},
        "cpu_ms": {
            "engine": [engine_cpu],
            "server": [server_cpu],
            "client": [client_cpu],
            "bare": [bare_cpu],
        },
    }


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.server_overhead", description=__doc__)
    parser.add_argument("--crowd-s", type=float, default=60.0, help="length of the last part")
    options = parser.parse_args()
    size = Size(crowd_s=options.crowd_s)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(folder, MODEL))
        floor = stack.enter_context(bare.serving(folder))
        found = measure(size, folder, server, floor)
        crowd = asyncio.run(served.crowd(server, size))
        found.resident_mib["served"] = served.memory(server, size)
        found.resident_mib["bare"] = floor.resident_mib()
    print(table(found))
    print(
        f"crowd: {crowd['samples']:.0f} samples ({size.crowd_samples} in flight), "
        f"{crowd['heartbeats']:.0f} heartbeats,\n"
        f"  {crowd['late']:.0f} late, slowest {crowd['slowest_s']:.2f} s, "
        f"{crowd['errors']:.0f} errors"
    )
    print(f"measured on {machine()}")
    passed = all(row.passed for row in rows(found))
    about = {"benchmark": "server_overhead", "commit": commit(), "hardware": hardware()}
    results = {"figures": asdict(found), "crowd": crowd, "passed": passed}
    print(json.dumps({**about, "size": asdict(size), **results}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
