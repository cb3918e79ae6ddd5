"""Starts what is measured: the stub, a workload, a command; each a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 300


class MeasureError(Exception):
    """A measured process failed; the message ends with what it wrote to standard error."""


@dataclass(frozen=True)
class Sdk:
    """One side of the comparison."""

    label: str
    module: str
    python: str
    path: str = ""

    def argv(self, *arguments: str) -> list[str]:
        """A command line for this side's interpreter; -P keeps this folder off its path."""
        return [self.python, "-P", *arguments]

    def environment(self, home: str) -> dict[str, str]:
        """Nothing but what Python needs, so that no user setting reaches either side."""
        env = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        return {**env, "PYTHONPATH": self.path} if self.path else env


@dataclass
class Stub:
    """A running stub server; `seen` is filled when it has stopped."""

    base_url: str
    seen: dict[str, Any] = field(default_factory=dict)


@contextmanager
def stub_server(flags: Mapping[str, float]) -> Generator[Stub]:
    """Run the stub while the block runs."""
    argv = [sys.executable, "-m", "benchmarks.client_cost.stub"]
    argv += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stub = Stub(f"http://127.0.0.1:{int(process.stdout.readline())}")
        try:
            yield stub
        finally:
            process.stdin.close()
            stub.seen = json.loads(process.stdout.readline())


def run_workload(
    sdk: Sdk, workload: str, options: Mapping[str, int], flags: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """What the workload printed, and what its stub saw."""
    with tempfile.TemporaryDirectory() as home, stub_server(flags) as stub:
        script = str(HERE / "workloads.py")
        argv = sdk.argv(script, sdk.module, workload, stub.base_url, json.dumps(options))
        done = checked(argv, sdk.environment(home))
    return json.loads(done.splitlines()[-1]), stub.seen


def checked(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The command's standard output; `MeasureError` when it fails or takes too long."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"{argv[2:4]} took longer than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise MeasureError(f"exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def command_cpu_ms(sdk: Sdk, *arguments: str) -> float:
    """User and system time of one run of this side's interpreter."""
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            sdk.argv(*arguments),
            env=sdk.environment(home),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise MeasureError(f"exit {process.returncode}: {' '.join(arguments)}")
    return (usage.ru_utime + usage.ru_stime) * 1e3
