"""A terminal for tests: a pseudo-terminal with a program on it, and what its screen shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Self

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PIECE = re.compile(r"\033\[(\?*[0-9;]*)([A-Za-z])|([\r\n\b])|([^\033\r\n\b])", re.DOTALL)
_HALF_A_COMMAND = re.compile(r"\033(\[[0-9;?]*)?$")


class Screen:
    """Understands what our views send; wraps and scrolls like a terminal."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        # Mutable: all lines ever, those that scrolled away too, and where the cursor is.
        self._cells: list[list[str]] = [[]]
        self._x = self._y = 0
        # Whether some lines of a drawing are there, and others not yet.
        self.half_drawn = False
        self.wrapped = 0
        self.styles: set[str] = set()

    @property
    def lines(self) -> list[str]:
        """Everything from the top, as it looks now."""
        return ["".join(line).rstrip() for line in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def feed(self, text: str) -> None:
        """Take what was sent."""
        at = 0
        while at < len(text):
            piece = _PIECE.match(text, at)
            assert piece is not None, f"sent something unknown: {text[at : at + 10]!r}"
            at = piece.end()
            number, command, control, char = piece.groups()
            if command:
                self._command(number, command)
            elif control:
                self._control(control)
            else:
                self._put(char)

    def _command(self, number: str, command: str) -> None:
        match command:
            case "A":
                top = max(len(self._cells) - self.rows, 0)
                self._y = max(self._y - int(number or 1), top)
            case "K":
                self.half_drawn = True
                del self._cells[self._y][self._x :]
            case "J":
                self.half_drawn = False
                del self._cells[self._y][self._x :]
                del self._cells[self._y + 1 :]
            case "m":
                self.styles.add(number)
            case _:
                raise AssertionError(f"sent an unknown command: {number}{command}")

    def _control(self, control: str) -> None:
        if control == "\n":
            self._y += 1
            if self._y == len(self._cells):
                self._cells.append([])
        elif control == "\r":
            self._x = 0
        else:
            self._x = max(self._x - 1, 0)

    def _put(self, char: str) -> None:
        if self._x >= self.columns:
            self.wrapped += 1
            self._control("\n")
            self._x = 0
        line = self._cells[self._y]
        line += [" "] * (self._x + 1 - len(line))
        line[self._x] = char
        self._x += 1


class Terminal:
    """A program whose output is a pseudo-terminal; use it as a context manager."""

    def __init__(
        self, command: Sequence[str], *, columns: int, rows: int, env: dict[str, str]
    ) -> None:
        self.screen = Screen(columns, rows)
        self.sent = ""
        # Mutable: what was read and is not yet whole.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **env},
            text=True,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_input()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.hang_up()

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.columns, self.screen.rows = columns, rows

    def type(self, text: str) -> None:
        """Send a line to the program's standard input, which is a pipe."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def close_input(self) -> None:
        """Let the program's standard input end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def interrupt(self, number: int) -> None:
        """Send the program a signal."""
        self._process.send_signal(number)

    def until(self, there: Callable[[Screen], bool]) -> None:
        """Read until a whole drawing shows what is waited for."""
        while self.screen.half_drawn or not there(self.screen):
            assert self._read(), f"the program ended; its screen:\n{self.screen.text}"

    def end(self) -> int:
        """Read until the program has ended; returns its exit status."""
        while self._read():
            pass
        return self._process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Wait for the program without reading what it sends."""
        return self._process.wait(PATIENCE_S)

    def hang_up(self) -> None:
        """Take the terminal away."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
        assert ready, f"nothing more came; the screen:\n{self.screen.text}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the program has closed its side
            return False
        # A read may end in the middle of a character, or of a command.
        text = self._unread + self._decoder.decode(data)
        whole = len(text) if (half := _HALF_A_COMMAND.search(text)) is None else half.start()
        self._unread = text[whole:]
        self.sent += text[:whole]
        self.screen.feed(text[:whole])
        return bool(data)
