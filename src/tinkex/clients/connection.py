"""A connection set: transport, credentials and server flags, without a session.

`RestClient` and `AdminClient` need no more than this; `Session` adds the rest. Constructing one
does no I/O. User-facing clients hold a `Lease` on it; when the last one is dropped without
`close()`, the connection set closes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex._version import PROTOCOL_VERSION
from tinkex.clients.portal import LoopThread, Operations
from tinkex.clock import SystemClock
from tinkex.errors import APIError, ClosedError, NotFoundError
from tinkex.metrics import meter
from tinkex.telemetry.events import Telemetry
from tinkex.types import ClientConfigRequest, ClientDynamicConfigResponse
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from tinkex.clients.portal import Portal
    from tinkex.clock import Clock
    from tinkex.config import Config
    from tinkex.futures.future import APIFuture, Promise
    from tinkex.transport.api import Api
    from tinkex.transport.base import Transport

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MIN_REFRESH_S = 10.0


class Once(Generic[T]):
    """Runs an async factory once for all callers; after a failure the next caller runs it again."""

    def __init__(self, portal: Portal, factory: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._portal = portal
        self._factory = factory
        self._outcome: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """The value, made by the first caller; cancelling one caller does not harm the others."""
        if self._outcome is None:
            self._outcome = asyncio.get_running_loop().create_future()
            self._portal.spawn(self._make(self._outcome))
        return await asyncio.shield(self._outcome)

    async def _make(self, outcome: asyncio.Future[T]) -> None:
        try:
            outcome.set_result(await self._factory())
        except BaseException as error:  # noqa: BLE001 - raised in every caller
            self._outcome = None
            if isinstance(error, asyncio.CancelledError):
                error = ClosedError("the client was closed while it was connecting")
            outcome.set_exception(error)
            outcome.exception()  # marks it as retrieved, should every caller have been cancelled


class Connection:
    """One server, one credential, one loop."""

    _closed_message = "the client is closed"

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        portal: Portal | None = None,
        transport: Callable[[Config, Clock], Transport] | None = None,
    ) -> None:
        # Mutable state, touched on the loop only: the api, made by the first call that
        # needs it.
        if config.log_level is not None:
            # Asked for by the user through TINKER_LOG; nothing is installed otherwise.
            logging.basicConfig()
            logging.getLogger("tinkex").setLevel(config.log_level)
        self.config = config
        self.clock: Clock = clock or SystemClock()
        self.portal: Portal = portal or LoopThread()
        self.telemetry = (
            Telemetry(lambda: self.api, self.clock, self.portal.post, secrets=self._secrets)
            if config.telemetry
            else None
        )
        self.operations = Operations(self.portal, self.clock, on_error=self.report)
        self.closed = False
        self._make_transport = transport or _http_transport
        self._connected = Once(self.portal, self._connect)
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        """The api; only after `connected()`."""
        if self._api is None:
            raise ClosedError("the client is not connected yet")
        return self._api

    async def connected(self) -> Api:
        """Server flags fetched, credentials resolved."""
        if self.closed:
            raise ClosedError("ServiceClient is closed")
        return await self._connected.get()

    async def _connect(self) -> Api:
        from tinkex.transport.api import connect

        meter.find_opentelemetry()
        if self.config.embedded:
            # The only import of the server from the client; it loads nothing before this.
            from tinkex.embedded import connect as embedded

            self.config = await embedded(self.config)
        api = connect(self.config, self._make_transport(self.config, self.clock), self.clock)
        try:
            await self._ask_for_flags(api)
        except BaseException:
            # The next caller tries again with connections of its own.
            await api.aclose()
            raise
        if api.client_config.pjwt_auth_enabled:
            self.spawn_loop(api.auth.keep_fresh())
        self._api = api
        if self.telemetry is not None:
            self.spawn_loop(self.telemetry.run())
        return api

    def spawn_loop(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a background loop, outside the trace of the call that connected first."""
        self.portal.spawn(work, contextvars.Context())

    async def _ask_for_flags(self, api: Api) -> None:
        request = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        bootstrap_s = self.config.bootstrap_deadline_s
        api.follow(await api.call(routes.CLIENT_CONFIG, request, deadline_s=bootstrap_s))
        try:
            api.dynamic_config = await api.call(
                routes.CLIENT_DYNAMIC_CONFIG, request, deadline_s=bootstrap_s
            )
        except NotFoundError:
            api.dynamic_config = ClientDynamicConfigResponse()

    def report(self, error: BaseException) -> None:
        """Record an error that ended a call in telemetry and metrics; returns at once."""
        if meter.on:
            meter.failed(error)
        if self.telemetry is not None:
            self.telemetry.exception(error)

    def _secrets(self) -> Iterable[str]:
        """The credentials in use, so that none is ever recorded."""
        if self._api is not None:
            return self._api.auth.secrets()
        config = self.config
        values = (config.api_key, config.stored_key, *config.proxy_secrets())
        return [value for value in values if value]

    async def refresh_flags(self) -> None:
        """Keep the dynamic flags fresh until cancelled; a failed refresh keeps the old ones."""
        api = self.api
        while True:
            await self.clock.sleep(max(api.dynamic_config.refresh_interval_sec, _MIN_REFRESH_S))
            try:
                api.dynamic_config = await api.call(
                    routes.CLIENT_DYNAMIC_CONFIG,
                    ClientConfigRequest(sdk_version=PROTOCOL_VERSION),
                    deadline_s=0.0,
                )
            except APIError as error:
                _log.debug("client flags were not refreshed: %s", error)

    # -- the end ------------------------------------------------------------------------------

    def close(self, reason: str = "success", detail: str | None = None) -> APIFuture[None]:
        """End everything, from any thread; calls under way end with `ClosedError`."""
        promise: Promise[None] = self.operations.promise()
        if self.portal.started():
            self.portal.post(lambda: self._begin_to_close(promise, reason, detail), promise)
        else:
            self.closed = True
            promise.finish(None)
        return promise.future

    def abandon(self) -> None:
        """Close without finishing the session, from any thread: the last client was dropped."""
        if not self.closed and self.portal.started():
            with contextlib.suppress(ClosedError):
                self.portal.post(self._let_go)

    def _let_go(self) -> None:
        if not self.closed:
            self._begin_to_close(self.operations.promise(), None, None)

    def _begin_to_close(
        self, promise: Promise[None], reason: str | None, detail: str | None
    ) -> None:
        # Before the task runs: a client that is dropped right after `close()` closes once.
        self.closed = True
        self.portal.spawn(self._close(promise, reason, detail))

    async def _close(self, promise: Promise[None], reason: str | None, detail: str | None) -> None:
        """On the loop: pending calls first, then the session, the sockets, and the loop."""
        await self.portal.end_work(ClosedError(self._closed_message), keep=promise)
        if self._api is not None:
            await self._finish_session(reason, detail)
            if self.telemetry is not None:
                await self.telemetry.flush()
            await self._api.aclose()
        promise.finish(None)
        self.portal.stop()

    async def _finish_session(self, reason: str | None, detail: str | None) -> None:
        """End what the server keeps for this connection; `reason` is None after `abandon()`."""


ConnT = TypeVar("ConnT", bound=Connection, covariant=True)


class Lease(Generic[ConnT]):
    """Keeps a connection set open; held by clients and by their pending futures."""

    def __init__(self, connection: ConnT) -> None:
        self.connection = connection
        # Not at interpreter exit: the loop thread is gone by then, and so are its sockets.
        weakref.finalize(self, connection.abandon).atexit = False

    def operations(self) -> Operations:
        """For one client: its promises keep the connection open."""
        held = self.connection
        return Operations(held.portal, held.clock, keep_alive=self, on_error=held.report)


def _http_transport(config: Config, clock: Clock) -> Transport:
    from tinkex.transport.http import HttpTransport

    return HttpTransport(
        config.base_url,
        clock,
        connect_timeout_s=config.connect_timeout_s,
        proxy=config.proxy,
    )
