"""Local copies of remote files within a budget; the least recently used goes first.

A copy is named after the file and a version of it, so that what was replaced elsewhere is never
taken for what it was. When a copy was last used is its modification time, which outlives the
process.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from tinkex.engine.checkpoints.folder_files import Writing
from tinkex.engine.checkpoints.saved_files import SUFFIX
from tinkex.engine.checkpoints.storage import put_in_place, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

_VERSION_DIGITS: Final = 32


class FileCache:
    """Copies below one folder. Of one file, only the newest version is kept."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._writing = Writing(folder)
        # Mutable state, guarded: copies that are being read, which must stay.
        self._lock = threading.Lock()
        self._used: Counter[Path] = Counter()

    @contextmanager
    def new(self, needed_bytes: int) -> Generator[Path]:
        """A path to write to; `add` what should stay."""
        self._make_room(needed_bytes)
        try:
            with self._writing.file() as temporary:
                yield temporary
        except FileNotFoundError:
            raise  # there is nothing to copy
        except OSError as error:
            raise storage_error(error, "write", self._folder, needed_bytes) from error

    def add(self, temporary: Path, name: str, version: str) -> None:
        """Keep a finished file as the copy of a version."""
        self.forget(name)
        put_in_place(temporary, self._path(name, version))
        self._make_room(0)

    @contextmanager
    def reading(
        self, name: str, version: str, size: int, fetch: Callable[[Path], None]
    ) -> Generator[Path]:
        """The copy of a version, fetched when there is none; it stays while the block lasts."""
        path = self._path(name, version)
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
            self._make_room(0)

    def forget(self, name: str) -> None:
        """Remove every copy of a file."""
        for path in self._folder.glob(f"{name.removesuffix(SUFFIX)}@*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove half-written files; copies stay for the next process."""
        self._writing.close()

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
