"""The operating system's side of an engine process: start, output, liveness, exit.

Two daemon threads make the blocking calls: one reads lines, one waits for the exit. There are two
because a process that the engine started, such as a compiler, may keep the output open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinkex.clock import time_limit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from tinkex.clock import Clock

_log = logging.getLogger(__name__)

CHILD: Final = "tinkex.engine.process.child"
LOOKS: Final = 8
"""Checks within one timeout; the end of a silence is seen at most one check late."""
_COMPUTES: Final = frozenset("RD")  # running or ready to run; waiting for a disk
_STOPPED: Final = frozenset("Tt")  # by a signal; by a debugger
_KEPT_LINES: Final = 20
_LINE_BYTES: Final = 4096
# The child imports what its parent would: the parent's path may have been changed by hand.
_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main(int(sys.argv[1]))"
)


class Program:
    """A running child. `on_exit` is called on the loop that started it, once."""

    def __init__(self, popen: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        # Mutable state: the last lines (written by a thread), and whether it has ended.
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._exited = asyncio.Event()
        self._reader = threading.Thread(target=self._read, name="tinkex-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="tinkex-exit", daemon=True).start()

    @property
    def lines(self) -> list[str]:
        """The last lines of its output."""
        return list(self._lines)

    def kill(self) -> None:
        """Kill it; one that has exited is fine."""
        self._popen.kill()

    async def wait(self, clock: Clock, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it still runs after `timeout_s`."""
        async with time_limit(clock, timeout_s):
            await self._exited.wait()
        if not self._exited.is_set():
            return None
        # Its last lines are still in the pipe, unless another process keeps that open.
        await asyncio.to_thread(self._reader.join, timeout_s)
        return self._popen.returncode

    def _read(self) -> None:
        output = self._popen.stdout
        assert output is not None
        with output:
            while raw := output.readline(_LINE_BYTES):
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self._lines.append(line)
                    _log.warning("engine process %d: %s", self.pid, line)

    def _wait(self) -> None:
        self._popen.wait()
        try:
            self._loop.call_soon_threadsafe(self._gone)
        except RuntimeError:
            _log.debug("engine process %d ended after its parent's loop", self.pid)

    def _gone(self) -> None:
        self._exited.set()
        self._on_exit()


async def start_program(
    end: socket.socket, on_exit: Callable[[], None], module: str = CHILD
) -> Program:
    """Start a fresh interpreter that runs `main` of a module with `end` of a socket pair."""

    def spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(module=module), str(end.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[end.fileno()],
        )

    return Program(await asyncio.to_thread(spawn), on_exit)


class Silence:
    """Counts checks without a heartbeat.

    Checks, not seconds between heartbeats: when the watching process was itself stopped for a
    minute (Ctrl-Z, a debugger, a suspended machine), that minute is one check.
    """

    def __init__(self) -> None:
        self._looks = 0

    def look(self, look_s: float, *, heard: bool) -> float:
        """The seconds of silence so far; checks come every `look_s`."""
        self._looks = 0 if heard else self._looks + 1
        return self._looks * look_s


def verdict(
    silent_s: float, limit_s: float, busy_limit_s: float, computing: Callable[[], bool]
) -> str | None:
    """Why a process is given up after this much silence; None while it is not."""
    if silent_s >= limit_s and not computing():
        return f"gave no sign of life for {silent_s:g} s and was killed"
    if silent_s >= max(limit_s, busy_limit_s):
        return f"was busy and gave no sign of life for {silent_s:g} s, and was killed"
    return None


def computes(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a thread of a process runs or waits for a disk; False without `/proc`.

    Heartbeats need the interpreter's lock, which a library may hold for seconds while it is
    loaded. A stopped or deadlocked process has no such thread.
    """
    return not _COMPUTES.isdisjoint(_thread_states(pid, proc))


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a signal or a debugger has stopped a process; False without `/proc`."""
    states = _thread_states(pid, proc)
    return bool(states) and states <= _STOPPED


def _thread_states(pid: int, proc: Path) -> set[str]:
    try:
        stats = [path.read_text() for path in (proc / str(pid) / "task").glob("*/stat")]
    except OSError:  # no such system, or a thread that has just ended
        return set()
    # "pid (name) state ...", where the name may hold anything.
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def how_it_ended(code: int | None, reason: str | None, lines: Iterable[str]) -> str:
    """One sentence on the end of an engine's process, then its last lines.

    `code` is what `Popen.wait` returns, None if the process did not exit; `reason` is why its
    parent killed it, if it did.
    """
    if reason is not None:
        how = reason if code is not None else f"{reason}, and it is still there"
    elif code is None:
        how = "closed its connection and does not end"
    elif code < 0:
        how = f"was killed by signal {-code} ({_signal_name(-code)})"
        if -code == signal.SIGKILL:
            how += "; the system does that when memory runs out"
    else:
        how = f"ended with exit code {code}"
    tail = "\n".join(lines)
    return f"the engine process {how}" + (f"; its last lines:\n{tail}" if tail else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
