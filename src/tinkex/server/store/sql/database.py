"""The calls of one event loop to the thread that owns the connection.

Calls that wait at the same moment share one transaction and one commit, in order of arrival,
and each is answered after that commit. Reads go the same way: they see every write that was
asked for before them.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tinkex.errors import ClosedError
from tinkex.server.store.sql.link import Errand, Failed, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

    from tinkex.server.store.sql.link import Place

T = TypeVar("T")
U = TypeVar("U")

# Large enough for any burst, small enough that the first of it does not wait for long.
_LARGEST_GROUP = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """`then` runs on the loop in order of commit, even when nobody waits any more."""

    errand: Errand
    then: Callable[[Any], Any] | None
    future: asyncio.Future[Any]


class Database:
    """Runs functions of a connection; make one on the loop that will call it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._closing = threading.Event()
        self._link = Link(place, self._closing)
        self._thread = threading.Thread(target=self._serve, name="tinkex-store", daemon=True)

    def start(self) -> None:
        """Start the thread; `close` ends it."""
        self._thread.start()

    async def close(self) -> None:
        """Do what waits, close the connection, end the thread."""
        self._closing.set()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    @overload
    async def read(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def read(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def read(self, do: Any, then: Any = None) -> Any:
        """What `do` finds, passed through `then` on the loop."""
        return await self._call(Errand(do, "read"), then)

    @overload
    async def write(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def write(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def write(self, do: Any, then: Any = None) -> Any:
        """Like `read`, after what `do` wrote is durable."""
        return await self._call(Errand(do, "full"), then)

    @overload
    async def write_lightly(self, do: Callable[[Connection], T]) -> T: ...
    @overload
    async def write_lightly(self, do: Callable[[Connection], T], then: Callable[[T], U]) -> U: ...
    async def write_lightly(self, do: Any, then: Any = None) -> Any:
        """Like `write`, for what can be done again: a power cut may undo it."""
        return await self._call(Errand(do, "light"), then)

    async def _call(self, errand: Errand, then: Callable[[Any], Any] | None) -> Any:
        if self._closing.is_set():
            raise ClosedError("the store is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put(_Call(errand, then, future))
        return await future

    def _serve(self) -> None:
        while group := self._next_group():
            answers = self._link.run([call.errand for call in group])
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(_settle, group, answers)
        self._link.close()

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


def _settle(group: Sequence[_Call], answers: Sequence[Any | Failed]) -> None:
    for call, answer in zip(group, answers, strict=True):
        try:
            if isinstance(answer, Failed):
                raise answer.error
            value = answer if call.then is None else call.then(answer)
        except Exception as error:  # noqa: BLE001 - the caller is told
            if not call.future.done():
                call.future.set_exception(error)
        else:
            if not call.future.done():
                call.future.set_result(value)
