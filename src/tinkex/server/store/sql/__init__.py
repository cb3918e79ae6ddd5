"""The durable store: SQLite or PostgreSQL behind one set of queries."""

from tinkex.server.store.sql.store import SqlStore

__all__ = ["SqlStore"]
