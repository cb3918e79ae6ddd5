"""Saved files at a URL, with a local cache of copies to read from.

A file is saved once the remote side has all of it, so a machine with an empty cache finds
everything. The only module that uses fsspec.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote, urlsplit

from tinkex.engine.checkpoints.cache import FileCache
from tinkex.engine.checkpoints.saved_files import FolderFiles, file_name
from tinkex.engine.checkpoints.storage import storage_error
from tinkex.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tinkex.engine.checkpoints.saved_files import SavedFiles

# Protocols whose uploads are atomic; others upload under a temporary name and rename.
_ATOMIC: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"}
)


class RemoteFiles:
    """Files below a URL, such as `s3://bucket/prefix`, and a cache of them."""

    def __init__(self, url: str, cache: FileCache) -> None:
        self._files, self._root = _connect(url)
        self._atomic = not _ATOMIC.isdisjoint(_protocols(self._files))
        self._cache = cache

    def put(self, location: str, write: Callable[[Path], object], needed_bytes: int) -> int:
        """Write a local file and upload it."""
        name = file_name(location)
        with self._cache.new(needed_bytes) as temporary:
            write(temporary)
            size = temporary.stat().st_size
            self._cache.add(temporary, name, self._upload(temporary, name, size))
        return size

    @contextmanager
    def open(self, location: str) -> Generator[Path]:
        """A local copy of the current remote file."""
        name = file_name(location)
        with self._storage_errors("read", name):
            version, size = self._stat(name)

        def fetch(path: Path) -> None:
            with self._storage_errors("read", name):
                self._files.get_file(self._path(name), str(path))

        with self._cache.reading(name, version, size, fetch) as path:
            yield path

    def copy(self, source: str, target: str) -> None:
        """Copy a file on the remote side."""
        name = file_name(source)
        with self._storage_errors("copy", name):
            self._stat(name)
            self._duplicate(name, file_name(target))

    def delete(self, location: str) -> None:
        """Delete a file and its local copies."""
        name = file_name(location)
        self._cache.forget(name)
        with self._storage_errors("delete", name):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def close(self) -> None:
        """Remove unfinished files; copies stay for the next process."""
        self._cache.close()

    def _upload(self, path: Path, name: str, size: int) -> str:
        """Upload a file and check its size; returns its version."""
        with self._storage_errors("write", name, size, writes=True):
            self._put(path, name)
            version, there = self._stat(name)
            if there != size:
                raise OSError(f"{size} bytes were sent and {there} are there")
        return version

    def _put(self, path: Path, name: str) -> None:
        if self._atomic:
            self._files.put_file(str(path), self._path(name))
            return
        self._files.makedirs(self._root, exist_ok=True)
        aside = self._path(f".{name}")
        self._files.put_file(str(path), aside)
        self._files.mv(aside, self._path(name))

    def _duplicate(self, source: str, target: str) -> None:
        if self._atomic:
            self._files.cp_file(self._path(source), self._path(target))
            return
        aside = self._path(f".{target}")
        self._files.cp_file(self._path(source), aside)
        self._files.mv(aside, self._path(target))

    def _stat(self, name: str) -> tuple[str, int]:
        """The current version and its size; raises `FileNotFoundError`."""
        info = cast("dict[str, Any]", self._files.info(self._path(name)))
        # What distinguishes two versions: the object's tag, or else its modification time.
        keys = ("ETag", "etag", "md5", "generation", "created", "mtime", "LastModified", "modified")
        marks = [f"{key}={info[key]}" for key in keys if info.get(key) is not None]
        return f"{info['size']} {' '.join(marks)}", int(info["size"])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _storage_errors(
        self, doing: str, name: str, needed_bytes: int | None = None, *, writes: bool = False
    ) -> Generator[None]:
        try:
            yield
        except Exception as error:  # fsspec passes on the exceptions of many libraries
            if isinstance(error, FileNotFoundError) and not writes:
                raise
            where = str(self._files.unstrip_protocol(self._path(name)))
            raise storage_error(error, doing, where, needed_bytes) from error


def _connect(url: str) -> tuple[Any, str]:
    try:
        import fsspec.core as fsspec

        # Without a listings cache, because other machines write there, too. Not a shared instance,
        # because that may have been made for another server.
        files, root = cast("Any", fsspec).url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:
        package = f"'fsspec[{_scheme(url)}]'"
        raise MissingPackageError(f"{_scheme(url)}:// cannot be used ({error})", package) from error
    except ValueError as error:
        raise InputError(f"{_scheme(url)!r} cannot be used: {error}", "artifacts") from error
    return files, str(root).rstrip("/")


def _scheme(url: str) -> str:
    # Only the scheme may be shown: a URL may contain a password.
    return url.partition("://")[0]


def _protocols(files: Any) -> tuple[str, ...]:
    found = files.protocol
    return (found,) if isinstance(found, str) else tuple(found)


_SAVED: Final = "saved"
_CACHE: Final = "cache"


def open_saved(folder: Path, url: str | None, cache_bytes: int) -> SavedFiles:
    """Files below `folder`, or at `url` with a cache below `folder`.

    A path, or a URL that begins with `file:`, is a folder, too, and needs no cache.
    """
    if url is None:
        return FolderFiles(folder / _SAVED)
    parts = urlsplit(url)
    if parts.scheme in ("", "file", "local"):
        path = Path(unquote(parts.path) if parts.scheme else url)
        if not path.is_absolute() or parts.netloc:
            raise InputError(f"{url!r} must be an absolute path or a URL", "artifacts")
        return FolderFiles(path)
    return RemoteFiles(url, FileCache(folder / _CACHE, cache_bytes))
