"""The thread's side of the database: its connection, transactions, and what survives a break.

Everything here blocks and belongs to one thread.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sqlalchemy.exc import DBAPIError

from tinkex.errors import StorageError
from tinkex.server.store.sql.failures import storage_error, unreachable

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine

_RETRY_EVERY_S = 0.1
_ATTEMPTS = 3


class Place(Protocol):
    """What SQLite and PostgreSQL do differently."""

    @property
    def shown(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def engine(self) -> Engine:
        """May begin transactions by the execution option `care`."""
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
        """Make a new connection take the lost one's place."""
        ...

    def lock(self, connection: Connection) -> None:
        """Become the store's one server, or raise `StorageError`."""
        ...

    def ticket(self, connection: Connection) -> str | None:
        """What a later connection can ask about this transaction, if anything."""
        ...

    def committed(self, connection: Connection, ticket: str) -> bool | None:
        """Whether that transaction took place; None when the database does not know yet."""
        ...

    def finish(self, connection: Connection) -> None:
        """Tidy up before the last connection closes."""
        ...

    def unlock(self) -> None:
        """Let another server have the store; the connection is closed."""
        ...


Care = Literal["read", "light", "full"]
"""What a transaction is for: nothing to keep, or to keep through a crash of this process, or
through a power cut too. A full one makes all before it safe as well."""
_CARES: tuple[Care, ...] = ("read", "light", "full")


@dataclass(frozen=True, slots=True)
class Errand:
    """Something to do in a transaction; doing it again from the start must be harmless."""

    do: Callable[[Connection], Any]
    care: Care


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to work that failed."""

    error: Exception


class _OutOfReachError(Exception):
    """There is no connection, so nothing needs to be tried one by one."""

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


class Link:
    """Runs work on a place's one connection."""

    def __init__(self, place: Place, closing: threading.Event) -> None:
        self.place = place
        self._closing = closing
        # Mutable state: the connection, while there is one, and whether there ever was.
        self._connection: Connection | None = None
        self._had_one = False

    def run(self, errands: Sequence[Errand]) -> list[Any | Failed]:
        """Do all of it in one transaction; if that fails, each in one of its own."""
        try:
            return self._transact(errands)
        except _OutOfReachError as error:
            return [Failed(error.error)] * len(errands)
        except Exception as error:  # noqa: BLE001 - a call ends here, answered
            if self._connection is not None and self._connection.in_transaction():
                self._drop()  # not even going back has worked
            if len(errands) == 1:
                return [Failed(self._translated(error))]
        return [answer for errand in errands for answer in self.run([errand])]

    def close(self) -> None:
        """Close the connection and give up the lock."""
        if self._connection is not None:
            with suppress(DBAPIError):
                self.place.finish(self._connection)
            self._drop()
        self.place.unlock()

    def _transact(self, errands: Sequence[Errand]) -> list[Any]:
        attempt = 1
        while True:
            try:
                return self._attempt(self._connected(), errands)
            except _BrokenError as broken:
                self._drop()
                if broken.ticket is not None and self._took_place(broken.ticket):
                    return broken.results
                if attempt == _ATTEMPTS:
                    error = unreachable(broken.cause, self.place.shown)
                    raise _OutOfReachError(error) from broken.cause
                # It did not take place, so doing it again does it once.
                attempt += 1

    def _attempt(self, connection: Connection, errands: Sequence[Errand]) -> list[Any]:
        care = max((errand.care for errand in errands), key=_CARES.index)
        results: list[Any] = []
        ticket = None
        try:
            connection.execution_options(care=care)
            with connection.begin():
                results.extend(errand.do(connection) for errand in errands)
                if care != "read":
                    ticket = self.place.ticket(connection)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise _BrokenError(error, ticket, results) from error
            raise
        return results

    def _took_place(self, ticket: str) -> bool:
        """Ask a new connection what became of a commit."""
        waited_s = 0.0
        while waited_s <= self.place.patience_s:
            try:
                connection = self._connected()
                with connection.begin():
                    found = self.place.committed(connection, ticket)
            except DBAPIError as error:
                self._drop()
                raise _OutOfReachError(unreachable(error, self.place.shown)) from error
            if found is not None:
                return found
            waited_s += self._wait()
        reason = "it does not say what became of a lost connection's work"
        raise _OutOfReachError(StorageError(f"{self.place.shown}: {reason}", self.place.shown))

    def _connected(self) -> Connection:
        waited_s = 0.0
        while self._connection is None:
            try:
                self._connection = self._connect()
            except StorageError as error:
                patience_s = self.place.patience_s if self._had_one and error.retryable else 0.0
                if waited_s >= patience_s or self._closing.is_set():
                    raise _OutOfReachError(error) from error
                waited_s += self._wait()
        return self._connection

    def _connect(self) -> Connection:
        with ExitStack() as undo:
            try:
                connection = undo.enter_context(self.place.engine.connect())
                connection.execution_options(care="read")
                with connection.begin():
                    self.place.prepare(connection)
            except DBAPIError as error:
                raise unreachable(error, self.place.shown) from error
            undo.pop_all()
        self._had_one = True
        return connection

    def _wait(self) -> float:
        self._closing.wait(_RETRY_EVERY_S)
        return _RETRY_EVERY_S

    def _translated(self, error: Exception) -> Exception:
        if not isinstance(error, DBAPIError):
            return error
        translated = storage_error(error, self.place.shown)
        if translated is None:
            return error
        if self.place.reopens:
            self._drop()
        translated.__cause__ = error
        return translated

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.close()
