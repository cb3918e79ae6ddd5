"""`make fuzz`: every fuzzer in turn, each for a number of minutes; ends with status 1 on a finding.

    python -m tests.property.fuzz_all --minutes 1 [--only TEXT]

Decoders are searched by coverage where atheris is installed, else by mutations. Inputs that break a
rule are written to `tests/property/crashers`, where `make test` tries them again: give them a
name that says what they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.property import fuzz

_CRASHERS = Path(__file__).parent / "crashers"
_ROOT = Path(__file__).parents[2]


def commands(seconds: float) -> dict[str, list[str]]:
    """The fuzzers by name."""
    limit = f"{seconds:g}"
    found = {
        "sessions": ["tests.property.sessions", "--seconds", limit],
        "sessions of a real server": ["tests.property.sessions", "--real", "--seconds", limit],
        "sequences of requests": ["tests.property.stateful", "--seconds", limit],
        "faults in the client": ["tests.property.sequences", "--seconds", limit],
    }
    # Other inputs each time.
    seed = str(int(time.time()))
    for name in fuzz.TARGETS:
        command = ["tests.property.fuzz", name]
        if importlib.util.find_spec("atheris") is not None:
            command += ["--atheris", f"-max_total_time={max(1, int(seconds))}", "-timeout=10"]
            command += [f"-artifact_prefix={_CRASHERS}/{name}-"]
        else:
            command += ["--seconds", limit, "--seed", seed]
        found[name] = command
    return found


def main() -> int:
    """Run all, print what was found, and say by the exit status whether that was nothing."""
    parser = argparse.ArgumentParser(prog="tests.property.fuzz_all", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each of them")
    parser.add_argument("--only", help="those whose name contains this text")
    args = parser.parse_args()
    paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    failed: list[str] = []
    for name, command in commands(60 * args.minutes).items():
        if args.only is not None and args.only not in name:
            continue
        sys.stderr.write(f"{name}\n")
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            failed.append(name)
            sys.stdout.write(f"{name}: status {done.returncode}\n{done.stdout[-4000:]}\n")
    found = f"findings in: {', '.join(failed)}" if failed else "nothing found"
    sys.stdout.write(f"{found}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
