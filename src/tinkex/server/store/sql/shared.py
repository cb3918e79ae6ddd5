"""What the parts of the store share: the database, and what of it is held in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.server.store.samples import Samples
from tinkex.server.store.sql.cache import Cache
from tinkex.server.store.sql.overflow import Overflow

if TYPE_CHECKING:
    from tinkex.server.store.records import Model, Operation, Sampler, Session
    from tinkex.server.store.sql.behind import Behind
    from tinkex.server.store.sql.database import Database

# Databases take only so many parameters, and a long transaction holds everybody else up.
AT_ONCE = 1000
_MANY = 10_000
_FINISHED = 2_000
_FINISHED_BYTES = 16 << 20


def _size(operation: Operation) -> int:
    outcome = operation.outcome
    return 0 if outcome is None or outcome.body is None else len(outcome.body)


class Shared:
    """State has one owner: the event loop. The database's thread never touches it."""

    def __init__(self, database: Database, behind: Behind) -> None:
        self._database = database
        self._behind = behind
        # Mutable state: samples; every unfinished operation in order of arrival, once they were
        # read; and caches of what the database holds.
        self._samples = Samples()
        self._overflow = Overflow(database)
        self._open: dict[str, Operation] = {}
        self._open_read = False
        self._finished: Cache[Operation] = Cache(_FINISHED, _FINISHED_BYTES, _size)
        self._session_cache: Cache[Session] = Cache(_MANY)
        self._model_cache: Cache[Model] = Cache(_MANY)
        self._sampler_cache: Cache[Sampler] = Cache(_MANY)
