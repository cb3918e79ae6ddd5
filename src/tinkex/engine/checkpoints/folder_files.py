"""Saved files in a folder: each is written aside, flushed, and then renamed into its place."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tinkex.engine.checkpoints.saved_files import file_name
from tinkex.engine.checkpoints.scratch import ScratchFolder
from tinkex.engine.checkpoints.storage import put_in_place, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path


class FolderFiles:
    """Files below one folder, which is made when first written to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Half-written files lie in a folder of their own, so that those of a process that was
        # killed are found and removed by the next.
        self._writing = Writing(folder)

    def put(self, location: str, write: Callable[[Path], object], needed_bytes: int) -> int:
        """Write a file; one that is already there is replaced in one go."""
        path = self._path(location)
        try:
            with self._writing.file() as temporary:
                write(temporary)
                size = temporary.stat().st_size
                put_in_place(temporary, path)
        except OSError as error:
            raise storage_error(error, "write", path, needed_bytes) from error
        return size

    @contextmanager
    def open(self, location: str) -> Generator[Path]:
        """The file itself."""
        path = self._path(location)
        try:
            path.open("rb").close()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, "read", path) from error
        yield path

    def copy(self, source: str, target: str) -> None:
        """Copy a file."""
        with self.open(source) as path:
            self.put(target, partial(shutil.copyfile, path), path.stat().st_size)

    def delete(self, location: str) -> None:
        """Delete a file."""
        path = self._path(location)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, "delete", path) from error

    def close(self) -> None:
        """Remove the folder of half-written files."""
        self._writing.close()

    def _path(self, location: str) -> Path:
        return self._folder / file_name(location)


class Writing:
    """Temporary files beside those they are to become, for any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = ScratchFolder(folder, ".writing-")
        # Mutable state: a number for the next file, guarded with the making of the folder.
        self._lock = threading.Lock()
        self._files = 0

    @contextmanager
    def file(self) -> Generator[Path]:
        """A path to write to; what is still there at the end is removed."""
        with self._lock:
            self._files += 1
            path = self._folder.path() / str(self._files)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        with self._lock:
            self._folder.close()
