"""Draws docs/img/demo.svg: what `tinkex demo` shows on a terminal of 80 columns.

    python docs/img/make_demo_picture.py

The demonstration is run for this, in an empty folder, and takes its minutes. What a terminal would
show in the end is drawn, with its colours; nothing is added but the command in the first line.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).with_name("demo.svg")
COLUMNS = 80
# Fonts and a link that a page would fetch from elsewhere; there is a plain font behind them.
_FETCHED = re.compile(r"\s*@font-face \{.*?\}|\s*<!-- [^>]*https[^>]* -->", re.DOTALL)
_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+|\x1b")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="tinkex-demo-"))
    try:
        status, written = _run(["tinkex", "demo"], folder)
    finally:
        shutil.rmtree(folder)
    if status != 0:
        sys.stderr.write(written)
        return 1
    PICTURE.write_text(_drawn("$ tinkex demo\n" + _screen(written)))
    return 0


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command on a terminal of its own; returns its status and all it wrote."""
    here, there = pty.openpty()
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    env["PATH"] = f"{bin_folder}:{env['PATH']}"
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=there, stdout=there, stderr=there, close_fds=True
    )
    os.close(there)
    written = bytearray()
    while True:
        try:
            piece = os.read(here, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(here)
    return process.wait(), written.decode()


def _screen(written: str) -> str:
    """What stands on the terminal after all this: lines written over are gone."""
    lines, row, fresh = [""], 0, False
    for piece in _PIECES.finditer(written):
        text, count, command = piece[0], piece[1], piece[2]
        if text == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            fresh = True
        elif command == "A":
            row = max(row - int(count or 1), 0)
        elif command == "J":  # what is below, and this line if we are at its beginning
            lines = [*lines[:row], ""] if fresh else lines[: row + 1]
        elif command == "K" and (fresh or count == "2"):
            lines[row] = ""
        elif command in (None, "m"):
            lines[row] = text if fresh else lines[row] + text
            fresh = False
    return "\n".join(lines).rstrip()


def _drawn(text: str) -> str:
    """The text as a picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="256")
    console.print(Text.from_ansi(text))
    return _FETCHED.sub("", console.export_svg(title="tinkex demo", theme=MONOKAI))


if __name__ == "__main__":
    sys.exit(main())
