"""Files that are written whole or not at all, and that survive a crash of the machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.engine.storage import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write(temporary_path)` make a file, then put it in its place durably."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            put_in_place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, "write", path) from error


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished file of the same file system, instead of what may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _flush(temporary)
    temporary.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
