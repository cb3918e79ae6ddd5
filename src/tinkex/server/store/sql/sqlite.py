"""SQLite: how the file is opened, who may own it, when a commit is on the disk."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

from tinkex.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

_PRAGMAS = (
    "busy_timeout = 10000",  # the key commands write beside the server
    "journal_mode = WAL",
    "journal_size_limit = 67108864",  # a burst does not leave a large log behind
)
_PRIVATE = 0o600
_log = logging.getLogger(__name__)
_SYNCHRONOUS = {"light": "NORMAL", "full": "FULL"}


class Sqlite:
    """A database in a file."""

    # A file is not lost like a connection is, but one that was opened read-only stays so.
    patience_s = 0.0
    reopens = True

    def __init__(self, url: URL) -> None:
        self.path = Path(str(url.database))
        self.shown = str(self.path)
        self.engine = _engine(url, self.path)
        # Mutable state: the open lock file, while this process owns the store.
        self._lock: int | None = None

    def prepare(self, connection: Connection) -> None:
        """Nothing: each connection is set up when it is made."""

    def lock(self, connection: Connection) -> None:
        """Become the one server of this file; the system lets go when the process ends."""
        self._take("End that server, or give this one another store.")

    def share(self, connection: Connection, lease_s: float) -> None:
        """Become the one node: a file is for one."""
        self._take(
            "SQLite holds a cluster of one node: end that server, or give all nodes a PostgreSQL "
            "database (`--database postgresql://…`)."
        )

    def _take(self, advice: str) -> None:
        if self._lock is not None:
            return
        beside = f"{self.path}.lock"
        try:
            file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"The lock {beside} cannot be made ({error.strerror}); make its folder writable.",
                beside,
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            raise _taken(self.shown, f"process {owner}", advice) from None
        self._lock = file
        with suppress(OSError):  # the lock holds, whether or not its owner can be noted
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    def ticket(self, connection: Connection) -> str | None:
        """A commit to a file has happened or failed; there is nothing to ask later."""
        return None

    def committed(self, connection: Connection, ticket: str) -> bool | None:
        """Never asked: there are no tickets."""
        return False

    def finish(self, connection: Connection) -> None:
        """Leave one file behind, not a file and its log."""
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def unlock(self) -> None:
        """Let another server have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _taken(place: str, owner: str, advice: str) -> StorageError:
    error = StorageError(
        f"The store at {place} is in use by another server ({owner}). {advice}", place
    )
    error.retryable = False
    return error


def _keep_private(path: Path) -> None:
    """Let only its user read the file; SQLite gives its log and its index the same mode.

    What is wrong with the file is found, and said better, when it is opened.
    """
    with suppress(OSError):
        # O_EXCL: a file that is there must not be opened, for closing it would end the locks of
        # all connections that this process has to it, and another process would delete their log.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE))
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):
            found = stat.S_IMODE(each.stat().st_mode)
            if found & ~_PRIVATE:
                each.chmod(found & _PRIVATE)
                _log.warning("%s could be read by other users of this machine; no more", each)


def _engine(url: URL, path: Path) -> Engine:
    engine = create_engine(url, poolclass=NullPool)

    @event.listens_for(engine, "do_connect")
    def prepare(*_: object) -> None:
        _keep_private(path)

    @event.listens_for(engine, "connect")
    def setup(connection: Any, record: object) -> None:
        # We begin transactions ourselves; Python's own rules would begin them too late.
        connection.isolation_level = None
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        durability = connection.get_execution_options().get("durability", "full")
        if durability == "read":
            connection.exec_driver_sql("BEGIN")
            return
        # FULL waits for the disk, and with it for everything that was written before.
        connection.exec_driver_sql(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
        # Without IMMEDIATE, a transaction that reads first may fail to get the lock for writing.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
