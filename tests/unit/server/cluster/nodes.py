"""Nodes for tests: small apps on real loopback sockets, in the loop of the test."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.patience import PATIENCE_S
from tinkex.clock import SystemClock
from tinkex.server.api.errors import error_reply
from tinkex.server.cluster.forwarding import Forwarder, NotOwner
from tinkex.server.cluster.hop import Hops
from tinkex.server.cluster.peers import NodeUnreachable, Peers
from tinkex.server.observability.requests import keep_sent_body
from tinkex.server.store.ownership import Node
from tinkex.serving.connections import ConnectionLimits
from tinkex.serving.http_server import HttpServer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request

    from tinkex.serving.tls import Tls

    Answer = Callable[[Request], Awaitable[Response]]
    Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SECRET = b"of the whole cluster"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def node_at(url: str, name: str = "b") -> Node:
    return Node(node_id=f"{name}-1", name=name, url=url, version=1)


def new_peers(**settings: Any) -> Peers:
    settings = {"long_poll_s": PATIENCE_S, **settings}
    return Peers(SystemClock(), **settings)


def new_hops(node_id: str = "a-1", *, now: float = 1000.0, secret: bytes = SECRET) -> Hops:
    return Hops(secret, node_id, lambda: now)


@asynccontextmanager
async def serving(
    answer: Answer, *, name: str = "b", prefix: str = "", tls: Tls | None = None
) -> AsyncGenerator[Node]:
    """An app with one route for everything, on the server that nodes have."""
    app = Starlette(routes=[Route(prefix + "/{path:path}", answer, methods=METHODS)])
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, ConnectionLimits(connections=200, per_address=200), tls=tls)
    task = asyncio.ensure_future(server.serve(listener))
    scheme, port = "http" if tls is None else "https", listener.getsockname()[1]
    try:
        yield node_at(f"{scheme}://127.0.0.1:{port}{prefix}", name)
    finally:
        server.close()
        await task
        listener.close()


@asynccontextmanager
async def scripted(script: Script, name: str = "b") -> AsyncGenerator[Node]:
    """A node that does with each connection what a test wants; it is cut off at the end."""
    writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield node_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", name)
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@dataclass
class Gateway:
    """A node that passes everything on to `target`, and notes what came of it."""

    forwarder: Forwarder
    target: Node
    read: bool = True
    outcomes: list[Exception] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Request) -> Response:
        try:
            if self.read:
                keep_sent_body(request.scope, await request.body())
            return await self.forwarder.forward(request, self.target)
        except (NodeUnreachable, NotOwner) as error:
            self.outcomes.append(error)
            return Response("elsewhere", 503)
        except Exception as error:  # noqa: BLE001 - as in app.py
            self.outcomes.append(error)
            return error_reply(request, error)
        finally:
            self.ended.set()


@asynccontextmanager
async def gateway_to(
    target: Node,
    *,
    read: bool = True,
    hops: Hops | None = None,
    peers: Peers | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncGenerator[tuple[Gateway, Node]]:
    """A gateway, and how it is reached."""
    peers = peers or new_peers(ssl_context=ssl_context)
    gateway = Gateway(Forwarder(peers, hops or new_hops()), target, read)
    try:
        async with serving(gateway.answer, name="a") as node:
            yield gateway, node
    finally:
        peers.close()


class Client:
    """A connection of a client that says exactly what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, head: str, body: bytes = b"") -> None:
        lines = [line.strip() for line in head.strip().splitlines()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Status and headers of the next reply that is not only provisional."""
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = text.strip().split("\r\n")
        if first.split()[1] == "100":
            return await self.head()
        pairs = [line.partition(": ") for line in lines]
        return int(first.split()[1]), [(name, value) for name, _, value in pairs]

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """A whole reply; raises `IncompleteReadError` for half of one."""
        status, pairs = await self.head()
        headers = dict(pairs)
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return status, headers, body


@asynccontextmanager
async def client_of(node: Node) -> AsyncGenerator[Client]:
    host, _, port = node.url.rpartition("//")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_S)
