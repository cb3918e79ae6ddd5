"""`python -m benchmarks.history`: what a server costs on a store in which much has ended.

The same short life is run on a store with a short past and on one with a long one, each time in a
fresh process; the rounds of the two alternate. Every bar is the ratio of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.history.filling import Past, fill
from benchmarks.history.life import KEY, MODEL
from tinkex.clock import SystemClock
from tinkex.server.api.identity import owner_of_key
from tinkex.server.store.sql import SqlStore

BAR = 1.5
# Full pages, and nothing more.
SHORT = Past(sessions=200, samplers=20, imports=100)
ROUNDS = 5


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.history", description=__doc__)
    parser.add_argument("--sessions", type=int, default=Past().sessions)
    parser.add_argument("--samplers", type=int, default=Past().samplers)
    parser.add_argument("--imports", type=int, default=Past().imports)
    past = Past(**vars(parser.parse_args()))
    sides = {"short": SHORT, "long": past}
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for side, one in sides.items():
            asyncio.run(_make(Path(folder, side), one))
        for number in range(ROUNDS + 1):
            print(f"round {number}", file=sys.stderr)
            for side in sides:
                for name, value in _life(Path(folder, side)).items():
                    if number > 0:
                        found[side].setdefault(name, []).append(value)
    print(_table(found))
    print(f"measured on {machine()}")
    passed = all(ratio(found, name) <= BAR for name in found["short"])
    about = {"benchmark": "history", "commit": commit(), "hardware": hardware()}
    print(json.dumps({**about, "past": asdict(past), "figures": found, "passed": passed}))
    return 0 if passed else 1


async def _make(path: Path, past: Past) -> None:
    async with SqlStore.open(path):
        pass
    fill(path, past, owner_of_key(KEY), MODEL, SystemClock().wall())


def _life(path: Path) -> dict[str, float]:
    copy = shutil.copy(path, path.with_suffix(".copy"))
    command = [sys.executable, "-m", "benchmarks.history.life", str(copy)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def ratio(found: dict[str, dict[str, list[float]]], name: str) -> float:
    """How many times as much the long past costs; what else runs on a machine only adds to it."""
    return min(found["long"][name]) / min(found["short"][name])


def _table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [f"{'':26}{'short past':>12}{'long past':>12}{'ratio':>8}   bar"]
    for name in found["short"]:
        unit = "MiB" if name == "memory" else "ms"
        short, long = (min(found[side][name]) for side in ("short", "long"))
        times = ratio(found, name)
        verdict = "" if times <= BAR else "  MISSED"
        lines.append(
            f"{name:26}{short:8.2f} {unit:3}{long:8.2f} {unit:3}{times:8.2f}   <= {BAR}{verdict}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
