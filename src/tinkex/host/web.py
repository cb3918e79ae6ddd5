"""The HTTP side of a server: its store, its app, and uvicorn around them."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from tinkex.errors import ClosedError
from tinkex.host.answers import HttpProtocol
from tinkex.host.gate import Gate
from tinkex.host.places import kept_secret
from tinkex.host.store import check_keys, opened_store
from tinkex.server.app import create_app

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from starlette.applications import Starlette

    from tinkex.clock import Clock
    from tinkex.host.engine import RestartingEngine
    from tinkex.host.settings import HostSettings
    from tinkex.server.observe.meters import Meters
    from tinkex.server.observe.readiness import Readiness
    from tinkex.server.settings import Settings

# How long requests that are being answered may take once the server ends.
_ANSWERS_S = 1
# A request sent on a connection that is just being closed is lost. So connections are closed by
# clients and load balancers, which keep idle ones for up to a minute, and not by the server.
_IDLE_S = 75


@asynccontextmanager
async def open_web(
    settings: HostSettings,
    server: Settings,
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
