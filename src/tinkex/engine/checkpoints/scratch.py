"""A folder for temporary files of this process.

It is created on first use and removed when closed. A process that was killed leaves its folder; the
next one removes all folders that are not locked by a running process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"


class ScratchFolder:
    """A folder of its own below `parent`; close it."""

    def __init__(self, parent: Path, prefix: str) -> None:
        self._parent = parent
        self._prefix = prefix
        # Mutable state: the folder and the handle that keeps it locked, once it is created.
        self._made: tuple[Path, int] | None = None

    def path(self) -> Path:
        """The folder; raises `OSError` when it cannot be created."""
        if self._made is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
            handle = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._made = folder, handle
        return self._made[0]

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        if self._made is not None:
            (folder, handle), self._made = self._made, None
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)

    def _remove_abandoned(self) -> None:
        for folder in self._parent.glob(f"{self._prefix}*"):
            try:
                handle = os.open(folder / _LOCK, os.O_RDWR)
            except OSError:
                continue  # just being created, or not a scratch folder
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # its process is running
            finally:
                os.close(handle)
