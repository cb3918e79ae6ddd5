"""A server for tests: the real app over a fake engine, with scripted faults.

In process, on virtual time:

    clock = FakeClock()
    async with FakeServer(clock=clock) as server, clock.running():
        transport = server.transport()

On a real socket, for blocking clients and other programs:

    with FakeServer().serve() as server:
        client = tinkex.ServiceClient(base_url=server.url, api_key="tml-test")
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.clock import SystemClock
from tinkex.errors import ClosedError, InputError
from tinkex.server.app import create_app, running
from tinkex.server.server_settings import ServerSettings
from tinkex.server.store.memory import MemoryStore
from tinkex.testing.asgi import AsgiTransport
from tinkex.testing.fake_clock import FakeClock
from tinkex.testing.fake_engine import FakeEngine
from tinkex.testing.faults import Faults
from tinkex.testing.recorder import ABORT, Recorder
from tinkex.types import ClientSessionFinished, ClientSessionFinishErrored

if TYPE_CHECKING:
    from collections.abc import Generator

    from tinkex.clients.service import ServiceClient
    from tinkex.clock import Clock
    from tinkex.server.api.call import Parts
    from tinkex.testing.fake_engine import Delays
    from tinkex.testing.recorder import SeenRequest
    from tinkex.transport.base import HttpRequest, Reply

API_KEY = "tml-test"
"""A key that every fake server accepts."""


class FakeServer:
    """The server with an in-memory store and a fake engine.

    `requests` lists what arrived, without credentials; `faults` scripts failures; `engine`
    and `store` can be looked into. Ids are `session-0`, `session-1`, …

    With `after`, it is the next start of a server that has ended: it has the same store, and
    nothing of what the other one held in memory.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        settings: ServerSettings | None = None,
        engine: FakeEngine | None = None,
        delays: Delays | None = None,
        record: bool = True,
        store: MemoryStore | None = None,
        after: FakeServer | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.settings = settings or ServerSettings()
        self.engine = engine or FakeEngine(self.clock, delays=delays)
        self.store = after.store if after is not None else store or MemoryStore(self.clock)
        self.faults = Faults()
        self.record = record
        self.requests: list[SeenRequest] = []
        self._ids = ids = itertools.count() if after is None else after._ids
        if after is not None:
            self.store.lose_memory()
        self._inner = create_app(
            self.store,
            self.engine,
            self.settings,
            self.clock,
            new_id=lambda: f"session-{next(ids)}",
        )
        self.app = Recorder(self, cast("Any", self._inner))
        # Mutable state: where it listens, and what runs in the background of which loop.
        self._url: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack: AsyncExitStack | None = None

    @property
    def url(self) -> str:
        """Where it listens, inside `serve()`."""
        if self._url is None:
            raise InputError("the server does not listen: use `with server.serve():`")
        return self._url

    @property
    def _parts(self) -> Parts:
        return cast("Parts", self._inner.state.parts)

    @property
    def entered(self) -> bool:
        """Whether its background work runs in some loop of this process."""
        return self._stack is not None

    def seen(self, route: str) -> list[SeenRequest]:
        """The requests to one route, in order of arrival."""
        return [request for request in self.requests if request.route == route]

    async def __aenter__(self) -> Self:
        """Run the worker in this loop, for use through `transport()`."""
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(running(self._parts))
        return self

    async def __aexit__(self, *outcome: Any) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.__aexit__(*outcome)

    def transport(self, base_url: str = "http://fake.invalid") -> InProcessTransport:
        """A transport straight into the app.

        It runs the server's background work in the loop of its first request, unless the
        server was entered with `async with`; closing the transport ends it.
        """
        return InProcessTransport(self, base_url)

    def service(self, **settings: Any) -> ServiceClient:
        """A client in the running loop and on this server's clock, without threads or sockets.

        Only its async calls work there. `settings` are fields of `Config`, such as deadlines.
        """
        from tinkex.clients.portal import CurrentLoop
        from tinkex.clients.service import ServiceClient
        from tinkex.clients.session import Session
        from tinkex.config import Config

        config = Config(base_url="http://fake.invalid", api_key=API_KEY, **settings)
        session = Session(
            config,
            clock=self.clock,
            portal=CurrentLoop(),
            transport=lambda config, clock: self.transport(),
        )
        return ServiceClient.over(session)

    @contextmanager
    def serve(self) -> Generator[FakeServer]:
        """Listen on a random loopback port, in a thread of its own."""
        if isinstance(self.clock, FakeClock):
            raise InputError("a real socket needs the system clock; use transport() instead")
        # Of no named protocol, asyncio would leave small answers waiting for an acknowledgement.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        server = _Server(self.app)

        def run() -> None:
            try:
                server.run([listener])
            finally:
                server.ready.set()

        thread = threading.Thread(target=run, name="tinkex-fake-server", daemon=True)
        thread.start()
        server.ready.wait()
        if not server.started:
            raise ClosedError("the fake server did not start")
        self._url, self._loop = f"http://{host}:{port}", server.loop
        try:
            yield self
        finally:
            self._url = self._loop = None
            server.should_exit = True
            thread.join()
            listener.close()

    def lose_samples(self) -> None:
        """Forget every sample, as a restart of the server does; callable from any thread."""
        if self._loop is None or _running_loop() is self._loop:
            self._lose_samples()
            return

        async def lose() -> None:
            self._lose_samples()

        asyncio.run_coroutine_threadsafe(lose(), self._loop).result()

    def _lose_samples(self) -> None:
        parts = self._parts
        parts.worker.forget_samples()
        for op_id in self.store.lose_samples():
            parts.waiters.ring(op_id)

    async def finish_session(self, session_id: str | None = None) -> None:
        """End a session (or all) from the server's side."""
        for session in await self.store.sessions():
            if session_id in (None, session.session_id) and session.active:
                status = ClientSessionFinished(reason=ClientSessionFinishErrored())
                await self._parts.worker.end_session(session, status)


class InProcessTransport(AsgiTransport):
    """`AsgiTransport` that also keeps the server's background work running."""

    def __init__(self, server: FakeServer, base_url: str) -> None:
        super().__init__(cast("Any", server.app), base_url, server.clock)
        self._server = server
        # Mutable state: the background task this transport started, if it did.
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None

    async def send(self, request: HttpRequest) -> Reply:
        """One request; the first also starts the server."""
        if self._task is None and not self._server.entered:
            await self._start()
        return await super().send(request)

    async def aclose(self) -> None:
        """End what the first request started."""
        task, self._task = self._task, None
        if task is not None and self._stop is not None:
            self._stop.set()
            await task

    async def _start(self) -> None:
        started, self._stop = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run(started, self._stop))
        await started.wait()

    async def _run(self, started: asyncio.Event, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            if isinstance(self._server.clock, FakeClock):
                await stack.enter_async_context(self._server.clock.running())
            await stack.enter_async_context(self._server)
            started.set()
            await stop.wait()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Protocol(HttpToolsProtocol):
    """Lets faults break the connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[ABORT] = self.transport.abort


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=0,
        )
        super().__init__(config)
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.ready.set()
