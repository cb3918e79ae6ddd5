"""A node as a real process: its readiness line, its log, its environment, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tinkex.ray_cluster.child_process import start_child
from tinkex.ray_cluster.nodes import NodeGroup, NodeSpec, node_specs
from tinkex.ray_cluster.secrets import NodeSecrets

if TYPE_CHECKING:
    from tinkex.ray_cluster.child_process import ChildProcess

SECRETS = NodeSecrets({"TINKEX_DATABASE": "postgresql://u:hidden-word@h/d"})
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def spec(code: str) -> NodeSpec:
    group = NodeGroup(kind="cpu", count=1, base_model="m")
    return node_specs("lab", [group], program=(sys.executable, "-c", code))[0]


async def started(code: str) -> ChildProcess:
    return await start_child(spec(code), SECRETS, "127.0.0.1", lambda _: None)


async def test_the_readiness_line_the_log_and_the_exit_status_are_read():
    code = (
        "import os, sys, json\n"
        "print('not json'); print('{broken'); print('[]'); print('x' * 10000)\n"
        "print(json.dumps({'url': 'http://h:1', 'models': []}), flush=True)\n"
        "sys.stderr.write('using ' + os.environ['TINKEX_DATABASE'])\n"
        "sys.exit(7)"
    )
    child = await started(code)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 7
    assert await child.ready == "http://h:1"
    assert "using postgresql://u:***@h/d" in child.lines
    assert max(map(len, child.lines)) <= 4096


async def test_secrets_of_the_machine_are_removed_from_the_log_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word-of-the-machine")
    code = "import os; print(os.environ['AWS_SECRET_ACCESS_KEY'], os.environ['TINKEX_DATABASE'])"
    child = await started(code)
    await asyncio.wait_for(child.wait(), PATIENCE_S)
    assert child.lines == ("*** postgresql://u:***@h/d",)


async def test_a_program_that_exits_before_reading_is_an_exit():
    group = NodeGroup(kind="cpu", count=1, base_model="m")
    [missing] = node_specs("lab", [group], program=("/nonexistent/program",))
    child = await start_child(missing, SECRETS, "127.0.0.1", lambda _: None)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) != 0
    assert "No such file" in " ".join(child.lines)


async def test_its_folder_is_its_own_and_is_removed():
    code = (
        "import json, sys; print(json.dumps({'url': sys.argv[sys.argv.index('--data-dir') + 1]}))"
    )
    child = await started(code)
    folder = Path(await asyncio.wait_for(child.ready, PATIENCE_S)) if False else None
    await asyncio.wait_for(child.wait(), PATIENCE_S)
    folder = Path(await child.ready)
    assert folder.name.startswith("tinkex-lab-")
    assert not folder.exists()


async def test_processes_that_a_node_started_end_with_it():
    code = (
        "import json, subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(json.dumps({'url': str(other.pid)}), flush=True)"
    )
    child = await started(code)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0
    # It was sent SIGKILL, and ends when the kernel runs it next.
    with contextlib.suppress(ProcessLookupError):
        _await_end(os.pidfd_open(int(await child.ready)))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_node_is_killed_with_the_process_that_started_it():
    node = "import json, signal, os; print(json.dumps({'url': str(os.getpid())}), flush=True)\n"
    parent = f"""
import asyncio, sys
from tests.unit.ray_cluster.test_child_process import started
async def main():
    child = await started({node + "signal.pause()"!r})
    running = asyncio.create_task(child.wait())
    print(await child.ready, flush=True)
    await running
asyncio.run(main())
"""
    program = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert program.stdout is not None
    pid = int(json.loads(program.stdout.readline()))
    assert _runs(pid)
    # The kernel gives a file descriptor that becomes readable when the process has ended.
    descriptor = os.pidfd_open(pid)
    program.send_signal(signal.SIGKILL)
    program.wait(PATIENCE_S)
    _await_end(descriptor)
    program.stdout.close()


def _await_end(descriptor: int) -> None:
    import select

    try:
        assert select.select([descriptor], [], [], PATIENCE_S)[0], "the process did not end"
    finally:
        os.close(descriptor)
