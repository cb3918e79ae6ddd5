"""New files and folders under names that nothing else has, with the mode that the umask gives.

`tempfile` makes them readable for their owner only, which is wrong for files that are shared.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
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


def _made(parent: Path, prefix: str, make: Callable[[Path], T]) -> tuple[T, Path]:
    for _ in range(_ATTEMPTS):
        path = parent / f"{prefix}{secrets.token_hex(4)}"
        try:
            return make(path), path
        except FileExistsError:
            continue
    raise FileExistsError(f"no unused name in {parent}")
