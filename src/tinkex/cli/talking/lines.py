"""What a person types: edited and remembered on a terminal, line by line from a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_PROMPT = "> "
_HISTORY = ".tinkex_chat_history"
_MOST_LINES = 1000


def is_interactive() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typed() -> Iterator[str]:
    """Lines from a terminal, until its end; Ctrl-C empties the line."""
    with _remembered(Path.home() / _HISTORY):
        while True:
            try:
                yield input(_PROMPT)
            except KeyboardInterrupt:
                print("\n/quit or Ctrl-D leaves.", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return


def piped() -> Iterator[str]:
    """Lines from a pipe or a file."""
    return (line.rstrip("\r\n") for line in sys.stdin)


@contextmanager
def _remembered(path: Path) -> Generator[None]:
    """Editing of lines, and those of earlier chats; without the library, neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        _write_history(readline, path)


def _write_history(readline: Any, path: Path) -> None:
    readline.set_history_length(_MOST_LINES)
    with suppress(OSError):  # a home that cannot be written to
        # Made first: what people say is for them alone to read.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        readline.write_history_file(path)
