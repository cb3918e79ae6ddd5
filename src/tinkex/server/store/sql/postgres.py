"""PostgreSQL: how we connect, who may own the database, what became of a lost commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tinkex.errors import MissingPackageError, StorageError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

# Gives up on a dead network within half a minute, where TCP alone takes hours.
_CONNECT = {
    "application_name": "tinkex",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
}
# One server per schema of a database; the first number is ours among all programs.
_LOCK = "(1953918571, hashtext(current_schema()))"
_HOLDERS = """
    SELECT DISTINCT mode FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND classid = 1953918571
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND objid::bigint = hashtext(current_schema())::bigint & 4294967295
"""
_SHORTEST_LEASE_S = 1.0
_OUR_BACKEND = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
# A server may be set up to answer before a commit is safe; other choices are its owner's.
_SYNCHRONOUS = """
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
"""
_END_BACKEND = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid = :pid AND backend_start = :started
"""


class Postgres:
    """A database on a server."""

    # A restarting server is back within this.
    patience_s = 15.0
    reopens = False

    def __init__(self, url: URL) -> None:
        shown = url.set(drivername="postgresql", query={})
        self.shown = shown.render_as_string(hide_password=True)
        self.engine = _engine(url)
        # Mutable state: our backend, to end it when we lose sight of it, whether this process is
        # the store's server, and the lease if it is one of several nodes.
        self._backend: tuple[int, object] | None = None
        self._owner = False
        self._lease_s: float | None = None

    def prepare(self, connection: Connection) -> None:
        """Replace the connection that was lost."""
        if self._backend is not None:
            pid, started = self._backend
            connection.execute(text(_END_BACKEND), {"pid": pid, "started": started})
        connection.execute(text(_SYNCHRONOUS))
        row = connection.execute(text(_OUR_BACKEND)).one()
        self._backend = (row.pid, row.backend_start)
        if self._lease_s is not None:
            self.share(connection, self._lease_s)
        elif self._owner:
            self.lock(connection)

    def lock(self, connection: Connection) -> None:
        """Become the one server of this database, as long as the connection lives."""
        got = connection.execute(text(f"SELECT pg_try_advisory_lock{_LOCK}")).scalar_one()
        if not got:
            raise self._taken(
                "is in use by the nodes of a cluster. End them, start this server as one of them "
                "(`tinkex serve --join NAME`), or give it another database."
                if self._shared(connection)
                else "is in use by another server. End that server, or give this one another "
                "database."
            )
        self._owner = True

    def share(self, connection: Connection, lease_s: float) -> None:
        """Become one node of several, as long as the connection lives."""
        got = connection.execute(text(f"SELECT pg_try_advisory_lock_shared{_LOCK}")).scalar_one()
        if not got:
            raise self._taken(
                "is in use by a server that is no node of a cluster. End that server, or start it "
                "with `--join NAME`, too."
            )
        idle_ms = round(max(lease_s, _SHORTEST_LEASE_S) * 1000)
        connection.execute(text(f"SET idle_in_transaction_session_timeout = {idle_ms}"))
        self._owner, self._lease_s = True, lease_s

    def _shared(self, connection: Connection) -> bool:
        return "ShareLock" in connection.execute(text(_HOLDERS)).scalars().all()

    def _taken(self, reason: str) -> StorageError:
        error = StorageError(f"The store at {self.shown} {reason}", self.shown)
        # The server that has just lost its connection may still be seen as the owner.
        error.retryable = self._owner
        return error

    def ticket(self, connection: Connection) -> str | None:
        """What a later connection can ask about this transaction; None when it wrote nothing."""
        query = "SELECT pg_current_xact_id_if_assigned()::text"
        return connection.execute(text(query)).scalar_one()

    def committed(self, connection: Connection, ticket: str) -> bool | None:
        """Whether a transaction was committed whose answer was lost."""
        status = connection.execute(
            text("SELECT pg_xact_status(CAST(:ticket AS xid8))"), {"ticket": ticket}
        ).scalar_one()
        return None if status == "in progress" else status == "committed"

    def finish(self, connection: Connection) -> None:
        """Nothing to do: the server maintains its files."""

    def unlock(self) -> None:
        """The connection that held the lock is gone."""
        self._owner, self._lease_s = False, None


def _engine(url: URL) -> Engine:
    try:
        # What an operator has put into the URL counts, such as a name for each node.
        ours = {name: value for name, value in _CONNECT.items() if name not in url.query}
        # Every commit is a full one: this server can crash while we remember what it has lost.
        return create_engine(url, poolclass=NullPool, connect_args=ours)
    except ModuleNotFoundError:
        raise MissingPackageError(
            "a PostgreSQL store needs psycopg", "'tinkex[postgres]'"
        ) from None
