"""New files and folders under unused names, with the mode that the umask gives; atomic replacement.

`tempfile` would make them readable by their owner only.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

T = TypeVar("T")

_ATTEMPTS: Final = 100


def new_file(folder: Path, prefix: str, *, mode: int = 0o666) -> tuple[int, Path]:
    """An open, empty file and its path; the umask is applied to `mode`."""

    def make(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    return _made(folder, prefix, make)


def new_folder(parent: Path, prefix: str) -> Path:
    """An empty folder."""
    return _made(parent, prefix, os.mkdir)[1]


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Generator[BinaryIO]:
    """A new file that replaces `path`, flushed to disk, when the body ends without an error."""
    handle, part = new_file(path.parent, f".{path.name}.", mode=mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink()
        raise


def _made(parent: Path, prefix: str, make: Callable[[Path], T]) -> tuple[T, Path]:
    for _ in range(_ATTEMPTS):
        path = parent / f"{prefix}{secrets.token_hex(4)}"
        try:
            return make(path), path
        except FileExistsError:
            continue
    raise FileExistsError(f"no unused name in {parent}")
