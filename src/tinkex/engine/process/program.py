"""The operating system's side of an engine process: starts it, reads its output, sees it end.

Two daemon threads do what would block a loop: one reads lines, one waits for the exit. They are
apart because a process the engine started, such as a compiler, may keep the output open.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from tinkex.clock import time_limit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tinkex.clock import Clock

_log = logging.getLogger(__name__)

_KEPT_LINES: Final = 20
_LINE_BYTES: Final = 4096
# The child imports what its parent would: the parent's path may have been changed by hand.
_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from tinkex.engine.process.child import main; main(int(sys.argv[1]))"
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
        """End it at once; one that has ended is fine."""
        self._popen.kill()

    async def wait(self, clock: Clock, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None when it is still there after `timeout_s`."""
        async with time_limit(clock, timeout_s):
            await self._exited.wait()
        if not self._exited.is_set():
            return None
        # What it wrote last is in the pipe, unless somebody else keeps that open.
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


async def start_program(end: socket.socket, on_exit: Callable[[], None]) -> Program:
    """Start a fresh interpreter that serves an engine on `end` of a socket pair."""

    def spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(end.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[end.fileno()],
        )

    return Program(await asyncio.to_thread(spawn), on_exit)
