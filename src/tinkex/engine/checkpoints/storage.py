"""Atomic writes, and errors that say what is wrong with the storage and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinkex.errors import StorageError
from tinkex.new_files import new_file

if TYPE_CHECKING:
    from collections.abc import Callable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ADVICE: Final = {
    errno.ENOSPC: "free some space there, or choose another place",
    errno.EDQUOT: "free some space there, have the quota raised, or choose another place",
    errno.EFBIG: "files there may not become this large; have the limit raised",
    errno.EROFS: "it is mounted read-only; mount it for writing, or choose another place",
    errno.EACCES: "this user may not use it; change its owner or mode, or choose another place",
    errno.EPERM: "this user may not use it; change its owner or mode, or choose another place",
    errno.ENOTDIR: "a part of the path is a file; choose another place",
    errno.EEXIST: "a part of the path is a file; choose another place",
}
_OTHERWISE: Final = "see whether it can be reached and used from this machine"
# How Rust, which writes safetensors, ends the system's message.
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")


def storage_error(
    error: BaseException, doing: str, place: Path | str, needed_bytes: int | None = None
) -> StorageError:
    """The error for what could not be done at a place, such as "write" or "read"."""
    number = _number(error)
    reason = _reason(error, number)
    sizes = _sizes(place, needed_bytes) if number in _FULL else ""
    advice = _ADVICE.get(number or 0, _OTHERWISE)
    return StorageError(f"cannot {doing} {place}: {reason}{sizes}; {advice}", str(place))


def full_disk(error: BaseException | None) -> str | None:
    """The system's message if a full disk or a quota caused an error."""
    while error is not None:
        if (number := _number(error)) in _FULL:
            return os.strerror(number or 0)
        error = error.__cause__
    return None


def _number(error: BaseException) -> int | None:
    """The system's number for an error, if it has one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, PermissionError):
        return errno.EACCES
    found = _OS_ERROR.search(str(error))
    return None if found is None else int(found[1])


def _reason(error: BaseException, number: int | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # an object store's own words, where it has some
    return f"{type(error).__name__}: {error}" if number is None else os.strerror(number)


def _sizes(place: Path | str, needed_bytes: int | None) -> str:
    parts = [f"{needed_bytes} bytes needed"] if needed_bytes is not None else []
    free = free_bytes(place) if isinstance(place, Path) else None
    if free is not None:
        parts.append(f"{free} free")
    return f" ({', '.join(parts)})" if parts else ""


def free_bytes(path: Path) -> int | None:
    """Free bytes on the file system of a path, which need not exist yet."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:  # not made yet
            continue
    return None


def write_atomically(path: Path, write: Callable[[Path], None], *, mode: int = 0o600) -> None:
    """Call `write(temporary_path)`, then rename the file to `path` durably.

    `mode` is the file's mode before the umask.
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
    """Flush a finished file and rename it to `path`, on the same file system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Content before name, then the folder: a crash leaves the old file or the complete new one.
    _flush(temporary)
    temporary.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
