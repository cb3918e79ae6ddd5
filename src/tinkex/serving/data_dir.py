"""The data folder of a server and what it holds, and the socket that it listens on."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import threading
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final

from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

DATABASE: Final = "tinkex.db"
AUDIT: Final = "audit.log"
_SAVED: Final = "adapters"
_BACKLOG = 2048
_SECRET_BYTES = 32
_LOOK_EVERY_S = 0.1
_log = logging.getLogger(__name__)


@contextmanager
def claimed_folder(folder: Path, wait_s: float = 0.0) -> Generator[Path]:
    """Make a data folder and lock it; the system releases the lock when the process ends.

    Waits up to `wait_s` for a server that has locked it.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_private(folder)
        # Not truncated: a second server must be able to read which process has locked it.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise StorageError(
            f"the data folder {folder} cannot be used: {error.strerror}; choose another with "
            "--data-dir, or make it writable",
            str(folder),
        ) from error
    with file:
        try:
            _lock(file, wait_s)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise StorageError(
                f"the data folder {folder} is used by another server (process {owner}); stop it, "
                "or choose another folder with --data-dir or TINKEX_DATA_DIR; programs that are to "
                "share one need a `tinkex serve` that all of them name in TINKER_BASE_URL",
                str(folder),
            ) from error
        file.seek(0)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield folder


def keep_private(folder: Path) -> None:
    """Let only this user read what a server keeps in a folder, which may have been there before."""
    for name in (_SAVED, "secret", "lock", AUDIT, DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"):
        path = folder / name
        with suppress(OSError):  # it is not there, or belongs to another user
            found = stat.S_IMODE(path.stat().st_mode)
            if found & 0o077:
                path.chmod(found & 0o700)
                _log.warning("%s could be read by other users of this machine; no more", path)
    with suppress(OSError):
        (folder / _SAVED).mkdir(mode=0o700, exist_ok=True)


def _lock(file: IO[str], wait_s: float) -> None:
    """Lock the file; raises OSError if another process keeps it locked for `wait_s`."""
    never = threading.Event()
    for _ in range(round(wait_s / _LOOK_EVERY_S)):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            never.wait(_LOOK_EVERY_S)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def kept_secret(folder: Path) -> bytes:
    """The key that signs tokens and links: the same after a restart, readable by the user only."""
    path = folder / "secret"
    if not path.exists():
        fresh = folder / "secret.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            os.fsync(file.fileno())
        fresh.replace(path)
    return path.read_bytes()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients that connect wait until it is served."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With its protocol: asyncio sets TCP_NODELAY only where that says TCP.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(error.errno, f"{host} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _why(error, host, port)) from error
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a listener."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken; choose another with --port (0: any that is free)"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not allowed for this user; choose one above 1023"
    return f"{host}:{port} cannot be listened on: {error.strerror}"
