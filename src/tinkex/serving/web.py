"""The HTTP side of a server: its app, uvicorn, and what answers while the engine starts."""

from __future__ import annotations

import logging
import secrets
import ssl
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

import anyio
import msgspec

from tinkex._version import __version__
from tinkex.clock import time_limit
from tinkex.engine.process.supervisor import first_line
from tinkex.errors import InputError, TinkerError
from tinkex.server.app import create_app
from tinkex.server.cluster.member import Joined
from tinkex.server.store.ownership import NODE_VERSION, Node, NodeLoad
from tinkex.server.store.sql import SqlStore
from tinkex.server.supervision import quietly
from tinkex.serving.data_dir import DATABASE, kept_secret
from tinkex.serving.hosts import HostCheck
from tinkex.serving.http_server import HttpServer
from tinkex.serving.shared_weights import check_shared
from tinkex.serving.start_record import started

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tinkex.clock import Clock
    from tinkex.engine.process.supervisor import RestartingEngine
    from tinkex.server.observability.meters import Meters, Readiness
    from tinkex.server.server_settings import ServerSettings
    from tinkex.serving.host_settings import HostSettings

_OPEN: Final = ("/healthz", "/readyz", "/metrics")
_PATIENCE_S: Final = 20.0
_RETRY_AFTER_S: Final = 1
_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_web(
    settings: HostSettings,
    server: ServerSettings,
    engine: RestartingEngine,
    clock: Clock,
    meters: Meters,
    readiness: Readiness,
    on_lost: Callable[[str], None],
) -> AsyncGenerator[Web]:
    """Open the store and make the app; raises what keeps either from that."""
    async with _opened_store(settings, clock) as store:
        if server.key_mode == "stored":
            await _check_keys(store, settings, clock)
        joined = None if settings.join is None else await _join(store, settings, clock, on_lost)
        signed = replace(
            server,
            secret=kept_secret(settings.data_dir) if joined is None else joined.membership.secret,
            public_url=settings.public_url,
            watched_folder=settings.data_dir,
        )
        app = create_app(
            store, engine, signed, clock, meters=meters, readiness=readiness, joined=joined
        )
        yield Web(app, engine, clock, settings)


async def _join(
    store: SqlStore, settings: HostSettings, clock: Clock, on_lost: Callable[[str], None]
) -> Joined:
    """Become a node; raises why that is refused."""
    name, url = settings.node_name or "node", settings.node_url or ""
    node = Node(
        node_id=f"{name}#{secrets.token_hex(4)}",
        name=name,
        url=url,
        version=NODE_VERSION,
        release=__version__,
        role=settings.role,
    )
    lease_s = settings.lease_s
    membership = await store.join(settings.join or "", node, lease_s)
    try:
        if settings.role == "full":
            # It may take longer than a lease: libraries of object stores are large.
            async with _renewing(store, lease_s, clock):
                await check_shared(store, membership, settings.artifacts or "", lease_s, clock)
        membership = replace(membership, now=await store.renew(lease_s, NodeLoad()))
    except BaseException:
        # Others need not wait until its lease has run out.
        with anyio.CancelScope(shield=True):
            await quietly(store.leave(), "leaving the cluster")
        raise
    context = None
    if url.startswith("https://") or settings.node_ca is not None:
        context = ssl.create_default_context(cafile=settings.node_ca)
    return Joined(
        membership=membership,
        lease_s=lease_s,
        on_lost=on_lost,
        rebalance_s=settings.rebalance_s,
        ssl_context=context,
    )


@asynccontextmanager
async def _renewing(store: SqlStore, lease_s: float, clock: Clock) -> AsyncGenerator[None]:
    """Renew the lease of a node that has not started yet, during the block."""

    async def renew() -> None:
        while True:
            await clock.sleep(lease_s / 3)
            await quietly(store.renew(lease_s, NodeLoad()), "renewing the lease")

    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(renew)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, outside the group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Web:
    """An app that is served once."""

    def __init__(
        self, app: Starlette, engine: RestartingEngine, clock: Clock, settings: HostSettings
    ) -> None:
        self._waiters = app.state.parts.waiters
        self._gate = Gate(cast("Any", app), engine, clock)
        self._tls = settings.tls()
        names = settings.allowed_hosts
        if names and settings.node_url is not None:
            # What other nodes send names this node by its own URL.
            names = (*names, urlsplit(settings.node_url).hostname or "")
        # Without keys of its own, whoever can name the server can use it.
        loopback = app.state.parts.settings.key_mode != "stored"
        checked = HostCheck(self._gate, names, loopback=loopback) if names or loopback else None
        self._server = HttpServer(
            checked or self._gate,
            settings.connection_limits(),
            trusted_proxies=settings.trusted_proxies,
            tls=self._tls,
        )
        connections = self._server.connections
        app.state.parts.meters.watch_connections(lambda: (len(connections), connections.refusals))

    async def serve(self, listener: socket.socket, on_started: Callable[[], None]) -> None:
        """Answer requests until `close`; returns when the app has ended, too.

        `on_started` is called when the app has started. Its listener accepts connections before.
        """
        self._gate.on_started = on_started
        with nullcontext() if self._tls is None else self._tls.watching():
            await self._server.serve(listener)

    def close(self) -> None:
        """Begin to shut down: new requests are refused, and long polls are answered now."""
        self._gate.close()
        self._waiters.close()
        self._server.close()


class Gate:
    """An ASGI app around the server's, which answers while the server cannot.

    Until the first engine is ready its models are unknown, so requests wait a while and are then
    refused with a 503. The operators' pages (`/healthz` and the like) always pass.
    """

    def __init__(self, app: ASGIApp, engine: RestartingEngine, clock: Clock) -> None:
        self._app = app
        self._engine = engine
        self._clock = clock
        # Mutable state: whether requests are refused, and what to call when the app has started.
        self._draining = False
        self.on_started: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Refuse new requests; those under way may finish."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with the reason."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._reporting_start(send))
            return
        if scope["type"] == "http" and not str(scope["path"]).endswith(_OPEN):
            if self._engine.generation == 0:
                await self._wait()
            if self._draining or self._engine.generation == 0:
                await _refuse(send, self._reason())
                return
        await self._app(scope, receive, send)

    def _reporting_start(self, send: Send) -> Send:
        async def report(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                self.on_started()

        return report

    async def _wait(self) -> None:
        async with time_limit(self._clock, _PATIENCE_S):
            try:
                await self._engine.wait_ready()
            except TinkerError:
                return  # the refusal says why

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


@asynccontextmanager
async def _opened_store(settings: HostSettings, clock: Clock) -> AsyncGenerator[SqlStore]:
    """The store, locked: no other server uses it while it is open, or only other nodes."""
    place = settings.database or settings.data_dir / DATABASE
    audit_file = None if settings.audit_file is None else Path(settings.audit_file)
    async with SqlStore.open(place, clock=clock, audit_file=audit_file) as store:
        if settings.join is None:
            await store.lock()
        await store.audit(started(settings, clock.wall()))
        yield store


async def _check_keys(store: SqlStore, settings: HostSettings, clock: Clock) -> None:
    """Refuse to listen to other machines before there is a key."""
    if await store.any_key(clock.wall()):
        return
    # Keys are in the database, which need not be in the folder; a node's folder is temporary.
    own = settings.database is None
    place = f"--data-dir {settings.data_dir}" if own else f"--database {store.place}"
    make = f"`tinkex key create {place}`"
    if not settings.on_loopback:
        raise InputError(
            f"{settings.host} can be reached from other machines, and there is no key yet: make "
            f"one with {make}, or listen on 127.0.0.1",
            "host",
        )
    _log.warning("there is no key yet, so every request is refused: make one with %s", make)
