"""The HTTP side of a server: its store, its app, and uvicorn around them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.clock import time_limit
from tinkex.engine.process.supervisor import first_line
from tinkex.errors import ClosedError, TinkerError
from tinkex.server.app import create_app
from tinkex.serving.data_dir import kept_secret
from tinkex.serving.store import check_keys, opened_store

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tinkex.clock import Clock
    from tinkex.engine.process.supervisor import RestartingEngine
    from tinkex.server.observability.meters import Meters, Readiness
    from tinkex.server.server_settings import ServerSettings
    from tinkex.serving.host_settings import HostSettings

# How long requests that are being answered may take once the server ends.
_ANSWERS_S = 1
# A request sent on a connection that is just being closed is lost. So connections are closed by
# clients and load balancers, which keep idle ones for up to a minute, and not by the server.
_IDLE_S = 75


@asynccontextmanager
async def open_web(
    settings: HostSettings,
    server: ServerSettings,
    engine: RestartingEngine,
    clock: Clock,
    meters: Meters,
    readiness: Readiness,
) -> AsyncGenerator[Web]:
    """Open the store and make the app; raises what keeps either from that."""
    async with opened_store(settings, clock) as store:
        if server.key_mode == "stored":
            await check_keys(store, settings)
        signed = replace(server, secret=kept_secret(settings.data_dir))
        app = create_app(store, engine, signed, clock, meters=meters, readiness=readiness)
        yield Web(app, engine, clock)


class Web:
    """An app that is served once."""

    def __init__(self, app: Starlette, engine: RestartingEngine, clock: Clock) -> None:
        self._waiters = app.state.parts.waiters
        self._gate = Gate(cast("Any", app), engine, clock)
        self._server = _Server(
            uvicorn.Config(
                cast("Any", self._gate),
                http=HttpProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_ANSWERS_S,
            )
        )

    async def serve(self, listener: socket.socket, on_started: Callable[[], None]) -> None:
        """Answer requests until `close`; returns when the app has ended, too."""
        self._server.on_started = on_started
        try:
            await self._server.serve([listener])
        except SystemExit as leaving:  # uvicorn's way to say so; the reason is in the log
            raise ClosedError("the app could not start; its log says why") from leaving

    def close(self) -> None:
        """Begin the end: nobody is let in any more, and long polls are answered now."""
        self._gate.close()
        self._waiters.close()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Says when it answers, and leaves the signals to the host."""

    on_started: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride] - a context manager all the same
        return nullcontext()


# Larger bodies are not copied to have them travel with their head.
_ONE_WRITE_BYTES = 64 * 1024


class Joined:
    """A transport that sends what is written in one turn of the loop at once, if it is small.

    uvicorn writes the head of an answer and its body apart. Each is a system call and a packet, and
    each wakes the client; for small answers that is most of what sending costs.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # Mutable state: what was written first in this turn and waits for more.
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send at the end of the turn, or with the next write."""
        if self._held:
            if len(data) <= _ONE_WRITE_BYTES:
                data = self._held + data
                self._held = b""
            else:
                self._flush()
            self._transport.write(data)
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what is held, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's own on a transport that joins writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn declares it
        super().connection_made(cast("asyncio.Transport", Joined(transport)))


_OPEN: Final = ("/healthz", "/readyz", "/metrics")
_PATIENCE_S: Final = 20.0
_RETRY_AFTER_S: Final = 1


class Gate:
    """An ASGI app around the server's, which answers while the server cannot work.

    Until the first engine is ready its models are unknown, so requests wait a while and are then
    asked to come back. What operators ask (`/healthz` and the like) is always let through.
    """

    def __init__(self, app: ASGIApp, engine: RestartingEngine, clock: Clock) -> None:
        self._app = app
        self._engine = engine
        self._clock = clock
        # Mutable state: whether it lets anybody in.
        self._draining = False

    def close(self) -> None:
        """Let nobody in from now on; who is in may finish."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or tell it why not."""
        if scope["type"] == "http" and not str(scope["path"]).endswith(_OPEN):
            if self._engine.generation == 0:
                await self._wait()
            if self._draining or self._engine.generation == 0:
                await _refuse(send, self._reason())
                return
        await self._app(scope, receive, send)

    async def _wait(self) -> None:
        async with time_limit(self._clock, _PATIENCE_S):
            try:
                await self._engine.wait_ready()
            except TinkerError:
                return  # the answer says why

    def _reason(self) -> str:
        if self._draining:
            return "The server is shutting down; what it accepted is kept. Try again."
        problem = self._engine.problem
        if problem is not None:
            return f"The engine cannot be started: {first_line(problem)}"
        return f"The server is starting: {self._engine.phase}. Try again."


async def _refuse(send: Send, reason: str) -> None:
    body = msgspec.json.encode({"detail": reason, "error": reason})
    headers: list[tuple[bytes, Any]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(_RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
