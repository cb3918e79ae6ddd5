"""uvicorn with our connections: accepts within the limits, with TLS where it is set up.

uvicorn's own listener counts a connection only after its TLS handshake, so that silent ones could
take every file descriptor. Here a connection is counted from `accept` on, and gets the TLS context
of that moment, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn

from tinkex.errors import ClosedError
from tinkex.serving.connections import Connections
from tinkex.serving.http_protocol import ServerConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from starlette.types import ASGIApp

    from tinkex.serving.connections import ConnectionLimits
    from tinkex.serving.tls import Tls

# How long requests under way may take once the server shuts down.
_ANSWERS_S: Final = 1
# Connections accepted before other work gets its turn.
_ACCEPTED_AT_ONCE: Final = 64
_RETRY_ACCEPT_S: Final = 0.2
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Of no use to programs, but a page of this server may be opened in a browser.
_HEADERS: Final = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
)
_TLS_HEADERS: Final = (("strict-transport-security", "max-age=31536000"),)

_log = logging.getLogger(__name__)


class HttpServer:
    """Serves an app once, on one listener."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        *,
        trusted_proxies: Sequence[str] = (),
        tls: Tls | None = None,
    ) -> None:
        self.connections = Connections(limits)
        self._server = _Server(
            uvicorn.Config(
                cast("Any", app),
                http=cast("Any", partial(ServerConnection, self.connections)),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=[*_HEADERS, *(_TLS_HEADERS if tls is not None else ())],
                proxy_headers=bool(trusted_proxies),
                forwarded_allow_ips=list(trusted_proxies),
                timeout_keep_alive=round(limits.idle_s),
                timeout_graceful_shutdown=_ANSWERS_S,
            ),
            self.connections,
            tls,
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until `close`; returns when the app has ended, too."""
        try:
            await self._server.serve([listener])
        except SystemExit as leaving:  # how uvicorn reports it; the reason is in the log
            raise ClosedError("the app could not start; its log says why") from leaving

    def close(self) -> None:
        """Begin to shut down."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves the signals to the host, and accepts connections itself."""

    def __init__(self, config: uvicorn.Config, connections: Connections, tls: Tls | None) -> None:
        super().__init__(config)
        self._connections = connections
        self._tls = tls
        self._listening: list[_Listening] = []

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride] - a context manager all the same
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # the app, but no listener of uvicorn
        if self.should_exit:
            return  # the app could not start, as older versions of uvicorn report it
        self._connections.start()
        for listener in sockets or ():
            self._listening.append(
                _Listening(listener, self._connections, self._connection, self._tls)
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self._listening:
            listening.close()
        await super().shutdown(sockets)
        self._connections.stop()

    def _connection(self) -> ServerConnection:
        make = cast("Callable[..., ServerConnection]", self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class _Listening:
    """Accepts the connections of one listener; the constructor begins."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make: Callable[[], ServerConnection],
        tls: Tls | None,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        # Mutable state: connections being set up, and the timer of a pause.
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more; connections that are not set up yet are closed."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connected, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait(error)
                return
            self._admit(connected, str(address[0]))

    def _admit(self, connected: socket.socket, address: str) -> None:
        verdict = self._connections.admit(address)
        if verdict == "dropped":
            connected.close()
            return
        connected.setblocking(False)
        with suppress(OSError):  # an answer's last packet is not held back
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._make()
        connection.accepted(address, verdict)
        task = self._loop.create_task(self._open(connection, connected))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: ServerConnection, connected: socket.socket) -> None:
        secure: dict[str, Any] = {}
        if self._tls is not None:
            limit_s = self._connections.limits.handshake_s
            secure = {"ssl": self._tls.context, "ssl_handshake_timeout": limit_s}
        try:
            await self._loop.connect_accepted_socket(lambda: connection, connected, **secure)
        except OSError as error:  # no TLS, a handshake that takes too long, or the client is gone
            _log.debug("a connection was not set up: %s", error)
        finally:
            if connection.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - not made
                connection.not_made()
                connected.close()

    def _wait(self, error: OSError) -> None:
        """Wait when there is nothing to accept connections with; an idle one makes room."""
        if error.errno not in _NO_FILES:
            _log.warning("a connection could not be accepted: %s", error.strerror)
            return
        if not self._connections.shed():
            _log.warning("no more connections can be accepted for now: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_RETRY_ACCEPT_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)
