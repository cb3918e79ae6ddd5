"""An HTTP proxy on loopback for tests: tunnels, forwarded requests, credentials, failures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

DENIED = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n"


class ForwardProxy:
    """A proxy in a thread of its own.

    `user_info` is the `user:password` it demands. `upstream` is where everything is sent, whatever
    the name asked for, so that tests need no name server. Instead of working it can give an
    `answer` (which is raw, and ends the connection) or be `silent`.
    """

    def __init__(
        self,
        *,
        user_info: str | None = None,
        upstream: str | None = None,
        answer: bytes | None = None,
        silent: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # Mutable state: the heads of the requests, and what the thread needs to end.
        self.heads: list[bytes] = []
        self.connections = 0
        self._user_info = user_info
        self.upstream = upstream
        self._answer = answer
        self._silent = silent
        self._tls = tls
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="forward-proxy", daemon=True)
        self._copying: set[asyncio.Task[None]] = set()
        self._port = 0

    def url(self, user_info: str = "", host: str = "127.0.0.1") -> str:
        """Its address, with credentials if given."""
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{user_info}{'@' if user_info else ''}{host}:{self._port}"

    @property
    def request_lines(self) -> list[str]:
        """The first lines of all requests, in order of arrival."""
        return [head.split(b"\r\n")[0].decode() for head in self.heads]

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._work(reader, writer)
        writer.close()

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if self._silent:
                await self._stop.wait()
            reply = self._answer if self._answer is not None else self._denial(head)
            if reply is not None:
                writer.write(reply)
                await writer.drain()
                return
            method, target, _ = head.decode().split(" ", 2)
            if method == "CONNECT":
                await self._tunnel(target, reader, writer)
                return
            if server is None:
                server = await self._open(urlsplit(target).netloc, writer)
            server.write(_for_server(head, target) + await reader.readexactly(_length(head)))

    def _denial(self, head: bytes) -> bytes | None:
        if self._user_info is None:
            return None
        token = base64.b64encode(self._user_info.encode())
        if b"\r\nProxy-Authorization: Basic " + token + b"\r\n" in head:
            return None
        return DENIED + b"Content-Length: 0\r\n\r\n"

    async def _tunnel(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        server = await self._open(target, writer, b"HTTP/1.1 200 Connection established\r\n\r\n")
        await _copy(reader, server)

    async def _open(
        self, place: str, client: asyncio.StreamWriter, greeting: bytes = b""
    ) -> asyncio.StreamWriter:
        """A connection to the server, whose bytes go to the client from now on."""
        host, _, port = (self.upstream or place).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        client.write(greeting)
        copying = asyncio.create_task(_copy(reader, client))
        self._copying.add(copying)
        copying.add_done_callback(self._copying.discard)
        copying.add_done_callback(lambda _: writer.close())
        return writer


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def _for_server(head: bytes, url: str) -> bytes:
    """The head as the server gets it: a path instead of the URL, and nothing about the proxy."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    lines = head.replace(url.encode(), target.encode(), 1).split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.startswith(b"Proxy-"))


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0
