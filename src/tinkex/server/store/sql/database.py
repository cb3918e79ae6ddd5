"""The calls of one event loop to the threads that own the database connections.

Calls that wait at the same moment share one transaction and one commit, in order of arrival, and
each returns after that commit. Reads are calls like these: they see every write that was called
before them. Listings, counts and sums have a connection and a thread of their own, so that a long
one delays no write; they see every write that had returned before them.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from sqlalchemy.exc import DBAPIError

from tinkex.errors import ClosedError, StorageError
from tinkex.server.store.sql.failures import storage_error, unreachable, was_undone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine


T = TypeVar("T")
U = TypeVar("U")

# Large enough for a burst, small enough that its first call does not wait for long.
_LARGEST_GROUP = 256

_RETRY_EVERY_S = 0.1
_ATTEMPTS = 3
Durability = Literal["read", "light", "full"]
"""What a transaction survives: nothing is written (`read`), a crash of this process (`light`), or a
power cut, too (`full`). A full one makes all earlier ones safe as well."""
_DURABILITIES: tuple[Durability, ...] = ("read", "light", "full")
# Databases limit the parameters of a statement, and a long transaction delays all other calls.
AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class _Call:
    """`then` runs on the loop in order of commit, even if its caller was cancelled."""

    unit: UnitOfWork
    then: Callable[[Any], Any] | None
    future: asyncio.Future[Any]


class Database:
    """Runs functions of a connection; make one on the loop that will call it."""

    def __init__(self, driver: DatabaseDriver, listing: DatabaseDriver) -> None:
        self.driver = driver
        self._closing = threading.Event()
        self._main = _Lane(driver, self._closing, "tinkex-store")
        self._listings = _Lane(listing, self._closing, "tinkex-store-listings", finishes=False)

    def start(self) -> None:
        """Start the threads; `close` ends them. They connect when they are first needed."""
        self._main.start()
        self._listings.start()

    async def close(self) -> None:
        """Run the calls that wait, close the connections, end the threads."""
        self._closing.set()
        await self._listings.end()
        await self._main.end()

    @overload
    async def read(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def read(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def read(self, do: Any, then: Any = None) -> Any:
        """What `do` returns, passed through `then` on the loop."""
        return await self._call(UnitOfWork(do, "read"), then)

    async def list(self, do: Callable[[Connection], T]) -> T:
        """What `do` returns: for what may read many rows, and needs to be no newer than called."""
        if self._closing.is_set():
            raise ClosedError("the store is closed")
        return await self._listings.call(UnitOfWork(do, "read"), None)

    @overload
    async def write(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def write(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def write(self, do: Any, then: Any = None) -> Any:
        """Like `read`, after the writes of `do` are durable."""
        return await self._call(UnitOfWork(do, "full"), then)

    @overload
    async def write_lightly(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def write_lightly(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def write_lightly(self, do: Any, then: Any = None) -> Any:
        """Like `write`, for what can be done again: a power cut may undo it."""
        return await self._call(UnitOfWork(do, "light"), then)

    @overload
    async def write_alone(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def write_alone(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def write_alone(self, do: Any, then: Any = None) -> Any:
        """Like `write`, for what locks rows that other nodes lock, too.

        On a node it has a transaction of its own: two nodes that hold the locks of several calls
        each would wait for each other.
        """
        return await self._call(UnitOfWork(do, "full", alone=True), then)

    def fence(self, check: Callable[[Connection], None]) -> None:
        """Run `check` first in every transaction that writes; what it raises refuses them all."""
        self._main.fence(check)

    async def _call(self, unit: UnitOfWork, then: Callable[[Any], Any] | None) -> Any:
        if self._closing.is_set():
            raise ClosedError("the store is closed")
        return await self._main.call(unit, then)


class _Lane:
    """One connection, the thread that owns it, and the calls that wait for it."""

    def __init__(
        self,
        driver: DatabaseDriver,
        closing: threading.Event,
        name: str,
        *,
        finishes: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._connections = ConnectionOwner(driver, closing, finishes=finishes)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fence(self, check: Callable[[Connection], None]) -> None:
        self._connections.fence = check

    async def end(self) -> None:
        """Run the calls that wait; `closing` is set, so there are no new ones."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, unit: UnitOfWork, then: Callable[[Any], Any] | None) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put(_Call(unit, then, future))
        return await future

    def _serve(self) -> None:
        while group := self._next_group():
            answers = self._connections.run([call.unit for call in group])
            with suppress(RuntimeError):  # the loop is closed, and its callers with it
                self._loop.call_soon_threadsafe(_settle, group, answers)
        self._connections.close()

    def _next_group(self) -> list[_Call]:
        """Everything that waits; empty once the database is closed."""
        group: list[_Call] = []
        call = self._queue.get()
        with suppress(Empty):
            while call is not None:
                group.append(call)
                if len(group) == _LARGEST_GROUP:
                    return group
                call = self._queue.get_nowait()
            if group:
                self._queue.put(None)  # closing waits for what came before it
        return group


def _settle(group: Sequence[_Call], answers: Sequence[Any | FailedCall]) -> None:
    for call, answer in zip(group, answers, strict=True):
        try:
            if isinstance(answer, FailedCall):
                raise answer.error
            value = answer if call.then is None else call.then(answer)
        except Exception as error:  # noqa: BLE001 - raised at the caller
            if not call.future.done():
                call.future.set_exception(error)
        else:
            if not call.future.done():
                call.future.set_result(value)


class DatabaseDriver(Protocol):
    """What SQLite and PostgreSQL do differently."""

    @property
    def shown(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def engine(self) -> Engine:
        """May begin transactions by the execution option `durability`."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a lost connection is tried again."""
        ...

    @property
    def reopens(self) -> bool:
        """Whether trouble may be the connection's own, so that the next call needs a new one."""
        ...

    def prepare(self, connection: Connection) -> None:
        """Set up a new connection, which may replace a lost one."""
        ...

    def lock(self, connection: Connection) -> None:
        """Become the store's one server, or raise `StorageError`."""
        ...

    def share(self, connection: Connection, lease_s: float) -> None:
        """Become one of the store's nodes, or raise `StorageError`.

        A transaction that stays idle for about the lease is undone, so that a process that was
        stopped in the middle of one does not hold its locks for ever.
        """
        ...

    def ticket(self, connection: Connection) -> str | None:
        """What a later connection can ask about this transaction, if anything."""
        ...

    def committed(self, connection: Connection, ticket: str) -> bool | None:
        """Whether that transaction was committed; None when the database does not know yet."""
        ...

    def finish(self, connection: Connection) -> None:
        """Clean up before the last connection closes."""
        ...

    def unlock(self) -> None:
        """Release the store for another server; the connection is closed."""
        ...


@dataclass(frozen=True, slots=True)
class UnitOfWork:
    """A function to run in a transaction; running it again from the start must be harmless."""

    do: Callable[[Connection], Any]
    durability: Durability
    alone: bool = False


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The result of a unit that failed."""

    error: Exception


class _OutOfReachError(Exception):
    """There is no connection, so no unit needs a try of its own."""

    def __init__(self, error: StorageError) -> None:
        super().__init__()
        self.error = error


class _BrokenError(Exception):
    """The connection broke; `ticket` is set when the commit was under way."""

    def __init__(self, cause: DBAPIError, ticket: str | None, results: list[Any]) -> None:
        super().__init__()
        self.cause = cause
        self.ticket = ticket
        self.results = results


def _transaction(place: int, unit: UnitOfWork) -> int:
    """Units next to each other with the same number share a transaction on a node."""
    if unit.alone:
        return place
    return -1 if unit.durability == "read" else -2


class ConnectionOwner:
    """Runs transactions on the one connection. Everything here blocks and belongs to one thread."""

    def __init__(
        self, driver: DatabaseDriver, closing: threading.Event, *, finishes: bool = True
    ) -> None:
        self.driver = driver
        self._closing = closing
        self._finishes = finishes
        # Mutable state: the connection, while there is one, and whether there ever was; what is
        # checked before a write, once this is a node.
        self._connection: Connection | None = None
        self._had_one = False
        self.fence: Callable[[Connection], None] | None = None

    def run(self, units: Sequence[UnitOfWork]) -> list[Any | FailedCall]:
        """Run all units in one transaction; if that fails, each in one of its own.

        On a node, writes do not share one with reads: a process that was stopped while it
        received a large answer would hold the lock of the fence for as long.
        """
        if self.fence is None or len(units) == 1:
            return self._run(units)
        groups = groupby(enumerate(units), key=lambda each: _transaction(*each))
        return [answer for _, some in groups for answer in self._run([unit for _, unit in some])]

    def _run(self, units: Sequence[UnitOfWork]) -> list[Any | FailedCall]:
        try:
            return self._transact(units)
        except _OutOfReachError as error:
            return [FailedCall(error.error)] * len(units)
        except Exception as error:  # noqa: BLE001 - a call ends here, answered
            if self._connection is not None and self._connection.in_transaction():
                self._drop()  # the rollback failed, too
            if len(units) == 1:
                return [FailedCall(self._translated(error))]
        return [answer for unit in units for answer in self._run([unit])]

    def close(self) -> None:
        """Close the connection and give up the lock."""
        if self._connection is not None:
            if self._finishes:
                with suppress(DBAPIError):
                    self.driver.finish(self._connection)
            self._drop()
        self.driver.unlock()

    def _transact(self, units: Sequence[UnitOfWork]) -> list[Any]:
        attempt = 1
        while True:
            try:
                return self._attempt(self._connected(), units)
            except _BrokenError as broken:
                self._drop()
                if broken.ticket is not None and self._was_committed(broken.ticket):
                    return broken.results
                if attempt == _ATTEMPTS:
                    error = unreachable(broken.cause, self.driver.shown)
                    raise _OutOfReachError(error) from broken.cause
            except DBAPIError as error:
                if attempt == _ATTEMPTS or not was_undone(error):
                    raise
                self._wait()
            # It was not committed, so running it again runs it once.
            attempt += 1

    def _attempt(self, connection: Connection, units: Sequence[UnitOfWork]) -> list[Any]:
        durability = max((unit.durability for unit in units), key=_DURABILITIES.index)
        results: list[Any] = []
        ticket = None
        try:
            connection.execution_options(durability=durability)
            with connection.begin():
                if self.fence is not None and durability != "read":
                    self.fence(connection)
                results.extend(unit.do(connection) for unit in units)
                if durability != "read":
                    ticket = self.driver.ticket(connection)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise _BrokenError(error, ticket, results) from error
            raise
        return results

    def _was_committed(self, ticket: str) -> bool:
        """Ask over a new connection whether a commit succeeded."""
        waited_s = 0.0
        while waited_s <= self.driver.patience_s:
            try:
                connection = self._connected()
                with connection.begin():
                    found = self.driver.committed(connection, ticket)
            except DBAPIError as error:
                self._drop()
                raise _OutOfReachError(unreachable(error, self.driver.shown)) from error
            if found is not None:
                return found
            waited_s += self._wait()
        reason = "it does not say what became of a lost connection's work"
        raise _OutOfReachError(StorageError(f"{self.driver.shown}: {reason}", self.driver.shown))

    def _connected(self) -> Connection:
        waited_s = 0.0
        while self._connection is None:
            try:
                self._connection = self._connect()
            except StorageError as error:
                patience_s = self.driver.patience_s if self._had_one and error.retryable else 0.0
                if waited_s >= patience_s or self._closing.is_set():
                    raise _OutOfReachError(error) from error
                waited_s += self._wait()
        return self._connection

    def _connect(self) -> Connection:
        with ExitStack() as undo:
            try:
                connection = undo.enter_context(self.driver.engine.connect())
                connection.execution_options(durability="read")
                with connection.begin():
                    self.driver.prepare(connection)
            except DBAPIError as error:
                raise unreachable(error, self.driver.shown) from error
            undo.pop_all()
        self._had_one = True
        return connection

    def _wait(self) -> float:
        self._closing.wait(_RETRY_EVERY_S)
        return _RETRY_EVERY_S

    def _translated(self, error: Exception) -> Exception:
        if not isinstance(error, DBAPIError):
            return error
        translated = storage_error(error, self.driver.shown)
        if translated is None:
            return error
        # A server that may read only stays so for a connection; another one may be the primary.
        if self.driver.reopens or translated.out_of_reach:
            self._drop()
        translated.__cause__ = error
        return translated

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.close()
