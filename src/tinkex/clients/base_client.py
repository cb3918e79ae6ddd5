"""What clients share: a connection set, `with` blocks, and one way to send without a session.

`RestClient` and `AdminClient` need no session. Made by itself, such a client owns its connections
and connects when first used; made by a `ServiceClient` it borrows the connections of that client,
and closing it leaves them open.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from tinkex.clients.arguments import given_text, one_of, whole_number
from tinkex.clients.connection import Connection, Lease
from tinkex.clients.portal import Operations
from tinkex.clients.twins import awaited
from tinkex.config import Config
from tinkex.errors import ClosedError, InputError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tinkex.futures.future import APIFuture, Promise
    from tinkex.telemetry.events import Telemetry
    from tinkex.transport.api import Api
    from tinkex.wire.routes import Route

AccessScope = Literal["owned", "accessible"]

ReqT = TypeVar("ReqT")
RepT = TypeVar("RepT")
ConnT = TypeVar("ConnT", bound=Connection)


class BaseClient(Generic[ConnT]):
    """What every client has: its connection set, and where its work runs."""

    def __init__(self, connection: ConnT, operations: Operations) -> None:
        self._connection = connection
        self._operations = operations

    @property
    def operations(self) -> Operations:
        """Where this client's work runs; for the twins of its methods."""
        return self._operations

    @property
    def holder(self) -> ConnT:
        """The connection set, or the session, behind this client."""
        return self._connection

    def get_telemetry(self) -> Telemetry | None:
        """The telemetry of the connection set, or None when it is off."""
        return self._connection.telemetry


class ClosableClient(BaseClient[ConnT]):
    """A client that ends with `close()`, or with its `with` or `async with` block."""

    _closing: APIFuture[None] | None = None

    @abstractmethod
    def _leave(self, error: BaseException | None) -> APIFuture[None]:
        """Close at the end of a block; `error` is what the block raised, if it did."""

    def _closed(self) -> ClosedError:
        return ClosedError(f"{type(self).__name__} is closed")

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
        self._leave(error).result()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._leave(error)


class ResourceClient(ClosableClient[Connection]):
    """Asks a server about what it keeps; constructing one does no I/O."""

    def __init__(
        self,
        _holder: Connection | Lease[Connection] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is not None and not (base_url is None and api_key is None):
            raise InputError("give either a holder or base_url and api_key, not both", "_holder")
        self._owns = _holder is None
        # Held by this client and by its pending futures: keeps the connections open.
        self._lent = held = _holder or Lease(
            Connection(Config.load(base_url=base_url, api_key=api_key))
        )
        connection = held if isinstance(held, Connection) else held.connection
        super().__init__(
            connection, Operations(connection.portal, connection.clock, keep_alive=held)
        )

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
        """Send one request for the public method that is named in a header."""
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

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> APIFuture[None]:
        """Close the client's own connections; calls under way end with `ClosedError`."""
        if self._closing is None:
            if self._owns:
                self._closing = self._connection.close()
            else:
                promise: Promise[None] = self._operations.promise()
                promise.finish(None)
                self._closing = promise.future
        return self._closing

    close_async = awaited(close)

    def _leave(self, error: BaseException | None) -> APIFuture[None]:
        return self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        name = type(self).__name__
        raise TypeError(f"a {name} belongs to its process and cannot be pickled; make a new one")


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
