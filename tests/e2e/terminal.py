"""A program on a terminal of eighty columns, and what a person sees and types there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.e2e.serving import environment
from tests.patience import PATIENCE_S
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

ROWS, COLUMNS = 24, 80
PRESS_AGAIN_S = 5.0
PRESSES = 40
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """The other end of a program's terminal."""

    def __init__(self, popen: subprocess.Popen[bytes], handle: int) -> None:
        self.popen = popen
        self._handle = handle
        self._unread = ""
        self.raw = ""

    def type(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C until this is shown.

        Once is not always enough: a signal that comes just before the interpreter begins to wait
        is seen only when it has waited.
        """
        for _ in range(PRESSES):
            self.type(CTRL_C)
            if self._comes(text, PRESS_AGAIN_S):
                break
        self.until(text)

    def until(self, text: str) -> str:
        """What is shown up to this text, which must come; without what steers a terminal."""
        assert self._comes(text, PATIENCE_S), f"{text!r} did not come; shown: {self._unread!r}"
        seen, _, self._unread = self._unread.partition(text)
        return seen + text

    def _comes(self, text: str, within_s: float) -> bool:
        clock = SystemClock()
        end = clock.now() + within_s
        while text not in self._unread:
            ready, _, _ = select.select([self._handle], [], [], max(end - clock.now(), 0))
            if not ready:
                return False
            self._read()
        return True

    def _read(self) -> None:
        try:
            data = os.read(self._handle, 65536).decode(errors="replace")
        except OSError:  # how Linux says that the program has gone
            data = ""
        assert data, f"the program has ended; shown: {self._unread!r}"
        self.raw += data
        self._unread += _CONTROL.sub("", data)

    def wait(self) -> int:
        return self.popen.wait(PATIENCE_S)


@contextmanager
def on_terminal(home: Path, *words: str, cwd: Path, **env: str) -> Generator[Terminal]:
    """`tinkex` on a terminal of its own."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    popen = subprocess.Popen(
        [sys.executable, "-m", "tinkex.cli", *words],
        cwd=cwd,
        env=environment(home, TERM="xterm-256color", **env),
        stdin=its,
        stdout=its,
        stderr=its,
        # A terminal of its own, so that Ctrl-C is a signal to the program.
        preexec_fn=_take_terminal,
        start_new_session=True,
    )
    os.close(its)
    with popen:
        try:
            yield Terminal(popen, mine)
        finally:
            popen.kill()
            os.close(mine)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
