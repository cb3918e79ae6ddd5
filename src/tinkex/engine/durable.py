"""Files that are written whole or not at all, and that survive a crash of the machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tinkex.engine.storage import storage_error
from tinkex.new_files import new_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], None], *, mode: int = 0o600) -> None:
    """Have `write(temporary_path)` make a file, then put it in its place durably.

    `mode` is what the file gets at most; the umask may take some of it away.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = new_file(path.parent, ".", mode=mode)
        granted = os.fstat(handle).st_mode & 0o777
        os.close(handle)
        try:
            write(temporary)
            # The library that writes may have replaced the file by one of its own.
            temporary.chmod(granted)
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
