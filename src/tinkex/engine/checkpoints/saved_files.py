"""The storage of saved adapters: its protocol, and files in a folder.

A location is a name that the server chose, never a path: `file_name` makes it a file name that
cannot leave its folder. `RemoteFiles` implements the protocol, too; tests/contracts/saved_suite.py
tests both. Calls block; the engine makes them on its file threads.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

from tinkex.engine.checkpoints.scratch import ScratchFolder
from tinkex.engine.checkpoints.storage import put_in_place, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

# File names have at most 255 bytes; some of them are for a version and a suffix.
_LONGEST: Final = 180
_KEPT: Final = 100
SUFFIX: Final = ".safetensors"


class SavedFiles(Protocol):
    """Files by location. Errors of the storage are raised as `StorageError`.

    Calls for one location are never made concurrently; calls for different ones are.
    """

    def put(self, location: str, write: Callable[[Path], object], needed_bytes: int) -> int:
        """Call `write(path)` and store the file; complete and durable when it returns.

        Returns its size. When it fails, the old file of the location stays.
        """
        ...

    def open(self, location: str) -> AbstractContextManager[Path]:
        """The path of the file, valid within the block; raises `FileNotFoundError`."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy a file atomically; raises `FileNotFoundError`."""
        ...

    def delete(self, location: str) -> None:
        """Delete a file; unknown locations are ignored."""
        ...

    def close(self) -> None:
        """Remove temporary files."""
        ...


def file_name(location: str) -> str:
    """The name of a location's file: unique, without separators or a leading dot."""
    quoted = quote(location, safe="").replace(".", "%2E")
    # Quoted names contain no equals sign, so this name is unique.
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_KEPT]}={sha256(location.encode()).hexdigest()}"
    return f"{quoted or '='}{SUFFIX}"


class FolderFiles:
    """Files below one folder, which is created by the first write.

    A file is written to a temporary path, flushed, and then renamed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Unfinished files have a folder of their own, so that the next process finds and removes
        # those of one that was killed.
        self._temporary = TemporaryFiles(folder)

    def put(self, location: str, write: Callable[[Path], object], needed_bytes: int) -> int:
        """Write a file; an existing one is replaced atomically."""
        path = self._path(location)
        try:
            with self._temporary.file() as temporary:
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
        """Remove the folder of unfinished files."""
        self._temporary.close()

    def _path(self, location: str) -> Path:
        return self._folder / file_name(location)


class TemporaryFiles:
    """Temporary files on the file system of a folder; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = ScratchFolder(folder, ".writing-")
        # Mutable state: a number for the next file. The lock guards it and the folder, which the
        # first of several file threads creates.
        self._lock = threading.Lock()
        self._files = 0

    @contextmanager
    def file(self) -> Generator[Path]:
        """A path to write to; the file is removed at the end unless it was renamed."""
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
