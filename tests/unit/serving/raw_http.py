"""A real `HttpServer` in a thread, and sockets that say exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvloop

from tests.patience import PATIENCE_S
from tinkex.server.cluster.hop import OF_NODE
from tinkex.serving.connections import ConnectionLimits
from tinkex.serving.data_dir import listen
from tinkex.serving.http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from starlette.types import Receive, Scope, Send

    from tinkex.serving.tls import Tls

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {
    "asyncio": None,
    "uvloop": uvloop.new_event_loop,
}


class App:
    """Answers with what it was asked; `/wait` when told to, `/large` with much.

    What `/node` asks comes from another node.
    """

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.large = 64 << 20
        self.waiting = threading.Event()
        self.disconnected = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        path = str(scope["path"])
        if path == "/node":
            scope[OF_NODE]()
        if path == "/wait":
            self.waiting.set()
            await self.release.wait()
        size = 0 if path == "/unread" else await self._read(receive)
        if path == "/large":
            await _answer(send, b"x" * self.large)
            return
        said: dict[str, Any] = {
            "path": path,
            "size": size,
            "client": scope["client"][0],
            "scheme": scope["scheme"],
            "headers": [name.decode() for name, _ in scope["headers"]],
        }
        await _answer(send, json.dumps(said).encode())

    async def _read(self, receive: Receive) -> int:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return size
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return size


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Running:
    """A server in another thread."""

    def __init__(self, listener: socket.socket, server: HttpServer, app: App) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.server = server
        self.app = app
        self.loop: asyncio.AbstractEventLoop | None = None
        self.raws: list[Raw] = []
        self._never = threading.Event()

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """What a call returns that is made on the server's loop."""
        loop = self.loop
        assert loop is not None

        async def made() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(made(), loop).result(PATIENCE_S)

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Look on the server's loop until something is true."""
        for _ in range(round(PATIENCE_S / 0.05)):
            if self.on_loop(true):
                return
            self._never.wait(0.05)
        raise AssertionError("it never became true")

    def connect(self, source: str = "127.0.0.1") -> Raw:
        raw = Raw(socket.create_connection(self.address, PATIENCE_S, source_address=(source, 0)))
        self.raws.append(raw)
        return raw

    def get(self, path: str = "/", headers: str = "", source: str = "127.0.0.1") -> Reply:
        with self.connect(source) as raw:
            raw.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
            return raw.reply()


class Reply:
    def __init__(self, head: bytes, body: bytes) -> None:
        first, *rest = head.decode().split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = dict(line.lower().split(": ", 1) for line in rest)
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """A connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._left = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Reply:
        """The next whole answer."""
        while b"\r\n\r\n" not in self._left:
            self._more()
        head, self._left = self._left.split(b"\r\n\r\n", 1)
        reply = Reply(head, b"")
        size = int(reply.headers["content-length"])
        while len(self._left) < size:
            self._more()
        reply.body, self._left = self._left[:size], self._left[size:]
        return reply

    def ends(self) -> bool:
        """Wait for the end of the connection, by a close or a reset."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionError:
            return True
        return True

    def _more(self) -> None:
        found = self.socket.recv(1 << 20)
        if not found:
            raise EOFError(f"the connection ended after {self._left!r}")
        self._left += found


def limits(**changed: Any) -> ConnectionLimits:
    # A connection that a test leaves half-way stays open however slow the machine is.
    patient = {"silent_s": PATIENCE_S, "head_s": PATIENCE_S, "handshake_s": PATIENCE_S}
    return ConnectionLimits(**{"connections": 64, "per_address": 32, **patient, **changed})


@contextmanager
def running(
    given: ConnectionLimits | None = None,
    *,
    loop: str = "uvloop",
    trusted_proxies: Sequence[str] = (),
    tls: Tls | None = None,
) -> Generator[Running]:
    """A server until the end of the block."""
    app = App()
    server = HttpServer(app, given or limits(), trusted_proxies=trusted_proxies, tls=tls)
    with listen("127.0.0.1", 0) as listener:
        found = Running(listener, server, app)
        started = threading.Event()

        async def serve() -> None:
            found.loop = asyncio.get_running_loop()
            started.set()
            await server.serve(listener)

        def run() -> None:
            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run, name="server")
        thread.start()
        assert started.wait(PATIENCE_S)
        try:
            yield found
        finally:
            for raw in found.raws:
                raw.socket.close()
            assert found.loop is not None
            found.loop.call_soon_threadsafe(app.release.set)
            server.close()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
