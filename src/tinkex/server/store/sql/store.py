"""The store that remembers across restarts.

One process owns it (`lock`), so what was read or written once may be answered from memory:
sessions, models, samplers, and every operation that is not finished. Payloads of finished
operations are in the database; memory holds the most recent ones only.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from tinkex.clock import SystemClock
from tinkex.server.store.sql import address
from tinkex.server.store.sql.behind import Behind
from tinkex.server.store.sql.database import Database
from tinkex.server.store.sql.ledger import Ledger
from tinkex.server.store.sql.operations import Work
from tinkex.server.store.sql.pruning import Pruning
from tinkex.server.store.sql.samplers import Samplers
from tinkex.server.store.sql.sessions import Sessions
from tinkex.server.store.sql.versions import bring_up
from tinkex.server.store.sql.weights import Weights

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path
    from typing import Self

    from tinkex.clock import Clock
    from tinkex.server.store.sql.database import Place


class SqlStore(Sessions, Weights, Samplers, Work, Ledger, Pruning):
    """A `Store` in SQLite or PostgreSQL. Used from the event loop it was opened on."""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str | Path, *, clock: Clock | None = None) -> AsyncGenerator[Self]:
        """The store at `sqlite:///PATH`, a plain path, or `postgresql://…`; made when new.

        Raises `StorageError` when it cannot be opened, or was made by a newer version.
        """
        place = _place(url)
        database = Database(place)
        behind = Behind(database, clock or SystemClock())
        database.start()
        try:
            await database.write(lambda c: bring_up(c, place.shown))
            async with behind.running():
                yield cls(database, behind)
        finally:
            with anyio.CancelScope(shield=True):
                await database.close()

    async def lock(self) -> None:
        """Become the store's one server until it is closed, or raise `StorageError`."""
        await self._database.write(self._database.place.lock)


def _place(url: str | Path) -> Place:
    parsed = address.parse(url)
    if parsed.drivername.startswith("sqlite"):
        from tinkex.server.store.sql.sqlite import Sqlite

        return Sqlite(parsed)
    from tinkex.server.store.sql.postgres import Postgres

    return Postgres(parsed)
