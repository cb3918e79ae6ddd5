"""The child is a program of its own: nothing of the parent's memory goes into it."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tinkex.clock import SystemClock
from tinkex.engine.process.program import start_program

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _command_line(pid: int) -> list[bytes]:
    """The words a process was started with; one that was forked has its parent's."""
    path = Path(f"/proc/{pid}/cmdline")
    # Empty for a moment: `exec` closes what `Popen` waits for before it sets the words.
    while not (line := path.read_bytes()):
        pass
    return line.split(b"\0")


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
async def test_the_child_is_a_fresh_interpreter_and_never_a_fork() -> None:
    ours, theirs = socket.socketpair()
    gone = asyncio.Event()
    with ours, theirs:
        child = await start_program(theirs, gone.set)
        try:
            words = _command_line(child.pid)
        finally:
            child.kill()
        code = await child.wait(SystemClock(), PATIENCE_S)
    await gone.wait()
    assert words[:2] == [sys.executable.encode(), b"-c"]
    assert b"tinkex.engine.process.child" in words[2]
    assert code == -9
