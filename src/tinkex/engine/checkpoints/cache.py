"""A cache of remote files on the local disk, with a size limit; evicts the least recently used.

The name of a copy contains the version of the file, so that a copy of an old version is never used.
The modification time of a copy is the time of its last use, which survives a restart.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from tinkex.engine.checkpoints.saved_files import SUFFIX, TemporaryFiles
from tinkex.engine.checkpoints.storage import put_in_place, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

_VERSION_DIGITS: Final = 32


class FileCache:
    """Copies below one folder, only the newest version of each file; thread-safe."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._temporary = TemporaryFiles(folder)
        # Mutable state: how many readers each copy has; copies with readers are not evicted. The
        # lock guards it, and makes counting and evicting exclude each other: otherwise a copy could
        # be removed between the count of a new reader and its read. Downloads and uploads run
        # without the lock, so that they run in parallel; two threads never use the same location at
        # the same time (see `SavedFiles`).
        self._lock = threading.Lock()
        self._used: Counter[Path] = Counter()

    @contextmanager
    def new(self, needed_bytes: int) -> Generator[Path]:
        """A temporary path to write to; pass it to `add` to keep the file."""
        self._make_room(needed_bytes)
        try:
            with self._temporary.file() as temporary:
                yield temporary
        except FileNotFoundError:
            raise  # the remote file does not exist
        except OSError as error:
            raise storage_error(error, "write", self._folder, needed_bytes) from error

    def add(self, temporary: Path, name: str, version: str) -> None:
        """Store a finished file as the copy of a version."""
        self.forget(name)
        put_in_place(temporary, self._path(name, version))
        self._make_room(0)

    @contextmanager
    def reading(
        self, name: str, version: str, size: int, fetch: Callable[[Path], None]
    ) -> Generator[Path]:
        """The copy of a version, fetched if there is none; not evicted within the block."""
        path = self._path(name, version)
        # Counted before the check that it exists, so that it cannot be evicted after the check.
        with self._lock:
            self._used[path] += 1
        try:
            if not _is_copy(path, size):
                with self.new(size) as temporary:
                    fetch(temporary)
                    self.add(temporary, name, version)
            path.touch()
            yield path
        finally:
            with self._lock:
                self._used[path] -= 1
                if not self._used[path]:
                    del self._used[path]
            # The budget may be exceeded while copies are read; evict now that one is free.
            self._make_room(0)

    def forget(self, name: str) -> None:
        """Remove every copy of a file."""
        for path in self._folder.glob(f"{name.removesuffix(SUFFIX)}@*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove unfinished files; copies stay for the next process."""
        self._temporary.close()

    def _path(self, name: str, version: str) -> Path:
        digits = sha256(version.encode()).hexdigest()[:_VERSION_DIGITS]
        return self._folder / f"{name.removesuffix(SUFFIX)}@{digits}{SUFFIX}"

    def _make_room(self, needed_bytes: int) -> None:
        with self._lock:
            found = sorted(self._copies())
            total = sum(size for _, size, _ in found) + needed_bytes
            for _, size, path in found:
                if total <= self._budget_bytes:
                    return
                if path not in self._used:
                    path.unlink(missing_ok=True)
                    total -= size

    def _copies(self) -> Generator[tuple[int, int, Path]]:
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                yield stat.st_mtime_ns, stat.st_size, path


def _is_copy(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
