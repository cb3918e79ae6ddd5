"""What all parts of the SQL store share: the database, and what memory has of it.

Copies of records are limited in number. On a node, where others change records, too, they are kept
only while changes are heard of.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sqlalchemy import text

from tinkex.server.store.sample_memory import SampleMemory
from tinkex.server.store.sql.hints import ALL, Listener, notify
from tinkex.server.store.sql.overflow import Overflow
from tinkex.server.store.sql.tenure import Tenure, claim_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from tinkex.clock import Clock
    from tinkex.server.store.records import Model, Operation, StoredSampler, StoredSession
    from tinkex.server.store.sql.database import Database
    from tinkex.server.store.sql.tenure import NodeFence
    from tinkex.server.store.sql.write_behind import WriteBehind

_MANY = 10_000
_FINISHED = 2_000
_FINISHED_BYTES = 16 << 20
_LOCK_OWNER = text(
    "SELECT pg_advisory_xact_lock(1953918572, hashtext(current_schema() || ' ' || :owner))"
)
_CONNECT_S: Final = 10.0
# Hints about claims, nodes and sessions are passed on; the others are for caches only.
_PASSED_ON = ("claim", "node", "session", "key", ALL)
V = TypeVar("V")

OLDEST_S: Final = 5.0
"""After this a copy is read again, so that a lost hint does little harm."""


def _weightless(value: object) -> int:
    return 0


class Cache(Generic[V]):
    """Values by id; the one that was used longest ago goes first."""

    def __init__(
        self, most: int, most_bytes: int = 1, size: Callable[[V], int] = _weightless
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._size = size
        # Mutable state: the values, last used last, and their size.
        self._values: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: str, value: V) -> None:
        self.discard(key)
        self._values[key] = value
        self._bytes += self._size(value)
        while len(self._values) > self._most or self._bytes > self._most_bytes:
            self.discard(next(iter(self._values)))

    def discard(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= self._size(value)

    def items(self) -> Iterator[tuple[str, V]]:
        """A copy of the entries, so that they may be changed during iteration."""
        return iter(list(self._values.items()))


class SharedCache(Cache[V]):
    """Copies of records that other nodes change, too.

    On a server that is no node it is a plain cache. On a node it holds nothing while no hints are
    heard, and nothing for longer than `OLDEST_S`. A hint may arrive between the read of a record
    and the moment the copy is kept: `version` is read before the record and given to `put`.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        # Mutable state: the clock, on a node; whether hints are heard; when each copy was read;
        # how many hints there were.
        self._clock: Clock | None = None
        self._hearing = True
        self._read_at: dict[str, float] = {}
        self.version = 0

    def share(self, clock: Clock) -> None:
        """Hold nothing, until hints are heard."""
        self._clock = clock
        self.hear(False)

    def hear(self, hearing: bool) -> None:
        """Note whether hints are heard from now on; what is held may be old."""
        self._hearing = hearing
        self.version += 1
        for key, _ in self.items():
            self.discard(key)

    def invalidate(self, key: str) -> None:
        """Forget a copy, because the record was changed."""
        self.version += 1
        self.discard(key)

    def get(self, key: str) -> V | None:
        if self._clock is not None and self._clock.now() > self._read_at.get(key, 0.0) + OLDEST_S:
            self.discard(key)
        return super().get(key)

    def put(self, key: str, value: V, version: int | None = None) -> None:
        """Keep a copy, unless a hint came after `version`."""
        if self._clock is None:
            super().put(key, value)
        elif self._hearing and version in (None, self.version):
            super().put(key, value)
            self._read_at[key] = self._clock.now()

    def amend(self, key: str, value: V) -> None:
        """Change a copy that is held; it is no newer than before."""
        if self.get(key) is not None:
            at = self._read_at.get(key)
            super().put(key, value)
            if at is not None:
                self._read_at[key] = at

    def discard(self, key: str) -> None:
        super().discard(key)
        self._read_at.pop(key, None)


def _size(operation: Operation) -> int:
    outcome = operation.outcome
    return 0 if outcome is None or outcome.body is None else len(outcome.body)


class StoreState:
    """What all parts of the store share. Owned by the event loop; the thread never touches it."""

    def __init__(self, database: Database, behind: WriteBehind) -> None:
        self._database = database
        self._behind = behind
        # Mutable state: samples; every unfinished operation in order of arrival, once they were
        # read; and caches of what the database holds.
        self._samples = SampleMemory()
        self._overflow = Overflow(database)
        self._open: dict[str, Operation] = {}
        self._open_read = False
        self._finished: Cache[Operation] = Cache(_FINISHED, _FINISHED_BYTES, _size)
        self._session_cache: SharedCache[StoredSession] = SharedCache(_MANY)
        self._model_cache: SharedCache[Model] = SharedCache(_MANY)
        self._sampler_cache: SharedCache[StoredSampler] = SharedCache(_MANY)
        # Mutable state of a node: itself, the epoch of every key it has adopted, the models of
        # samplers that were published, who wants hints, and what listens for them.
        self._member: NodeFence | None = None
        self._adopted: dict[str, int] = {}
        self._sampler_keys: dict[str, str] = {}
        self._hints: list[Callable[[str], None]] = []
        self._listener: Listener | None = None

    def _tenure(self, key: str | None) -> Tenure | None:
        """Under which claim this store writes for a key; None when it needs none."""
        member = self._member
        if member is None or key is None:
            return None
        epoch = self._adopted.get(key)
        if epoch is None:
            raise claim_lost(key, member.node_id)
        return Tenure(key, member.node_id, epoch)

    def _hint(self, connection: Connection, hint: str) -> None:
        """Send a hint with this transaction, if there may be other nodes."""
        if self._member is not None:
            notify(connection, self._member.node_id, hint)

    def _count_alone(self, connection: Connection, owner: str) -> None:
        """Let no other node count what an owner has until this transaction ends.

        Each would find room for one more. On a server that is no node one connection writes.
        """
        if self._member is not None and connection.dialect.name == "postgresql":
            connection.execute(_LOCK_OWNER, {"owner": owner})

    @property
    def _caches(self) -> dict[str, SharedCache[Any]]:
        """By the word for it in hints."""
        return {
            "session": self._session_cache,
            "model": self._model_cache,
            "sampler": self._sampler_cache,
        }

    async def _listen(self, node_id: str) -> None:
        """Hear of what other nodes change; before, nothing that they may change is cached."""
        for cache in self._caches.values():
            cache.share(self._behind.clock)
        engine = self._database.driver.engine
        if engine.dialect.name != "postgresql":
            self._hearing(True)  # the only node
            return
        loop = asyncio.get_running_loop()
        self._listener = Listener(engine, node_id, loop, self._heard, self._hearing)
        self._listener.start()
        await asyncio.to_thread(self._listener.wait, _CONNECT_S)

    async def stop_listening(self) -> None:
        """End the thread that hears hints."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await asyncio.to_thread(listener.close)

    def _hearing(self, hearing: bool) -> None:
        for cache in self._caches.values():
            cache.hear(hearing)
        if hearing:
            self._heard(ALL)

    def _heard(self, hint: str) -> None:
        kind, _, name = hint.partition(" ")
        if kind == ALL:
            for cache in self._caches.values():
                cache.hear(True)
        elif kind in self._caches:
            self._caches[kind].invalidate(name)
        if kind in _PASSED_ON:
            for each in self._hints:
                each(hint)
