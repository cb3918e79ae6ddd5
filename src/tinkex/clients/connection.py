"""A connection set: transport, credentials and server flags, without a session.

`RestClient` and `AdminClient` need no more than this; `Session` adds the rest. Constructing one
does no I/O. Everything below runs on its portal's loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex._version import PROTOCOL_VERSION
from tinkex.clients.operations import Operations
from tinkex.clients.portal import LoopThread
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
    from tinkex.transport.api import Api
    from tinkex.transport.base import Transport

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MIN_REFRESH_S = 10.0


class Once(Generic[T]):
    """Runs an async factory once for everybody who asks; a failure is told and forgotten."""

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
        except BaseException as error:  # noqa: BLE001 - handed to whoever asked
            self._outcome = None
            if isinstance(error, asyncio.CancelledError):
                error = ClosedError("the client was closed while it was connecting")
            outcome.set_exception(error)
            outcome.exception()  # marks it as seen, should every caller have gone away


class Connection:
    """One server, one credential, one loop."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        portal: Portal | None = None,
        transport: Callable[[Config, Clock], Transport] | None = None,
    ) -> None:
        # Mutable state, touched on the loop only: the api and what hangs on it, made by the
        # first call that needs them.
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
            # The one seam to the other half: nothing of it is loaded before it is needed.
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
        """Start what runs as long as the connection does: no part of the first caller's trace."""
        self.portal.spawn(work, contextvars.Context())

    async def _ask_for_flags(self, api: Api) -> None:
        request = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        bootstrap_s = self.config.bootstrap_deadline_s
        api.client_config = await api.call(routes.CLIENT_CONFIG, request, deadline_s=bootstrap_s)
        try:
            api.dynamic_config = await api.call(
                routes.CLIENT_DYNAMIC_CONFIG, request, deadline_s=bootstrap_s
            )
        except NotFoundError:
            api.dynamic_config = ClientDynamicConfigResponse()

    def report(self, error: BaseException) -> None:
        """Tell telemetry and metrics about an error that ended a call; returns at once."""
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

    async def disconnect(self) -> None:
        """Send what telemetry is left, briefly, and close the sockets."""
        if self._api is not None:
            if self.telemetry is not None:
                await self.telemetry.flush()
            await self._api.aclose()


def _http_transport(config: Config, clock: Clock) -> Transport:
    from tinkex.transport.http import HttpTransport

    return HttpTransport(
        config.base_url,
        clock,
        connect_timeout_s=config.connect_timeout_s,
        proxy=config.proxy,
    )
