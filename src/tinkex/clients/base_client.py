"""What `RestClient` and `AdminClient` share: a connection set, one way to send, and an end.

Neither needs a session. Standing alone, a client owns its connections and connects when first
used; made by a `ServiceClient` it borrows that one's, and closing it leaves them open.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tinkex.clients.arguments import given_text, one_of, whole_number
from tinkex.clients.connection import Connection
from tinkex.clients.operations import Operations, awaited
from tinkex.errors import ClosedError, InputError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tinkex.clients.session import Lease
    from tinkex.futures.future import APIFuture, Promise
    from tinkex.telemetry.events import Telemetry
    from tinkex.transport.api import Api
    from tinkex.wire.routes import Route

AccessScope = Literal["owned", "accessible"]

ReqT = TypeVar("ReqT")
RepT = TypeVar("RepT")


class ResourceClient:
    """Asks a server about what it keeps; constructing one does no I/O."""

    def __init__(
        self,
        _holder: Connection | Lease | Owned | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is not None and not (base_url is None and api_key is None):
            raise InputError("give either a holder or base_url and api_key, not both", "_holder")
        self._owned = Owned.load(base_url, api_key) if _holder is None else None
        # Held by this client and by its pending futures: keeps the connections open.
        self._lent = _holder or self._owned
        self._connection = _connection_of(self._lent)
        self._closing: APIFuture[None] | None = None
        self._operations = Operations(
            self._connection.portal, self._connection.clock, keep_alive=self._lent
        )

    @property
    def operations(self) -> Operations:
        """Where this client's work runs; for the twins of its methods."""
        return self._operations

    @property
    def holder(self) -> Connection:
        """The connection set behind this client."""
        return self._connection

    def get_telemetry(self) -> Telemetry | None:
        """The connection's telemetry, or None when it is off."""
        return self._connection.telemetry

    async def _call(
        self,
        method: str,
        route: Route[ReqT, RepT],
        request: ReqT | None = None,
        *,
        params: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> RepT:
        """Send one request in the name of a public method."""
        route.url(**(params or {}))  # refuses a bad id before anything is sent

        async def send() -> RepT:
            api = await self._connected()
            return await api.call(
                route,
                request,
                params=params,
                query=query,
                headers={"x-sdk-method": method, **(headers or {})},
                body=body,
            )

        return await self._operations.run(send)

    async def _connected(self) -> Api:
        if self._closing is not None:
            raise self._closed()
        return await self._connection.connected()

    def _closed(self) -> ClosedError:
        return ClosedError(f"{type(self).__name__} is closed")

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> APIFuture[None]:
        """Let go of the client's own connections; calls under way end with `ClosedError`."""
        if self._closing is None:
            self._closing = self._owned.close() if self._owned else self._done()
        return self._closing

    def _done(self) -> APIFuture[None]:
        promise: Promise[None] = self._operations.promise()
        promise.finish(None)
        return promise.future

    close_async = awaited(close)

    def __enter__(self) -> Self:
        if self._closing is not None:
            raise self._closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close().result()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close_async()

    def __reduce__(self) -> tuple[Any, ...]:
        name = type(self).__name__
        raise TypeError(f"a {name} belongs to its process and cannot be pickled; make a new one")


class Owned:
    """Keeps a connection set open; when nobody holds it any more, its sockets close."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # Not at interpreter exit: the loop thread is gone by then, and so are its sockets.
        weakref.finalize(self, _abandon, connection).atexit = False

    @classmethod
    def load(cls, base_url: str | None, api_key: str | None) -> Owned:
        """A connection set for these settings; does no I/O but reading them."""
        from tinkex.config import Config

        return cls(Connection(Config.load(base_url=base_url, api_key=api_key)))

    def close(self) -> APIFuture[None]:
        """End the connection set."""
        connection = self.connection
        promise: Promise[None] = connection.operations.promise()
        if connection.portal.started():
            connection.operations.post(promise, lambda: _begin_to_shut(connection, promise))
        else:
            connection.closed = True
            promise.finish(None)
        return promise.future


async def _shut(connection: Connection, promise: Promise[None]) -> None:
    """On the loop: pending calls first, then the sockets, then the loop."""
    connection.closed = True
    await connection.portal.end_work(ClosedError("the client is closed"), keep=promise)
    await connection.disconnect()
    promise.finish(None)
    connection.portal.stop()


def _begin_to_shut(connection: Connection, promise: Promise[None]) -> None:
    connection.portal.spawn(_shut(connection, promise))


def _abandon(connection: Connection) -> None:
    if not connection.closed and connection.portal.started():
        promise: Promise[None] = connection.operations.promise()
        connection.operations.post(promise, lambda: _begin_to_shut(connection, promise))


def _connection_of(holder: Connection | Lease | Owned | None) -> Connection:
    assert holder is not None
    if isinstance(holder, Connection):
        return holder
    return holder.connection if isinstance(holder, Owned) else holder.session


# -- arguments --------------------------------------------------------------------------------


def checkpoint_of(tinker_path: str, name: str = "tinker_path") -> dict[str, str]:
    """The path parameters of a checkpoint's routes."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(given_text(tinker_path, name))
    return {"run": parsed.training_run_id, "ckpt": parsed.checkpoint_id}


def page(limit: int, offset: int) -> dict[str, int]:
    """The query of a page."""
    for name, value in (("limit", limit), ("offset", offset)):
        whole_number(value, name)
        if value < 0:
            raise InputError(f"must not be negative, not {value}", name)
    return {"limit": limit, "offset": offset}


def scope(access_scope: AccessScope) -> dict[str, str]:
    """The query of an access scope."""
    return {"access_scope": one_of(access_scope, ("owned", "accessible"), "access_scope")}
