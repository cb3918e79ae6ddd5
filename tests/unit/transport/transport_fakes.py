"""Fakes of the transport tests: a raw loopback server, a scripted transport, a still clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from tinkex.errors import APIConnectionError
from tinkex.transport.base import HttpRequest, Reply

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[str]:
    connections: set[asyncio.StreamWriter] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        connections.discard(writer)
        writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()
        await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one request with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return head, await reader.readexactly(size)


def reply_bytes(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


Answer = Reply | APIConnectionError


@dataclass
class ScriptedTransport:
    """Gives its answers in order, the last one for ever, and remembers what was asked."""

    answers: list[Answer]
    requests: list[HttpRequest] = field(default_factory=list[HttpRequest])
    closed: bool = False

    async def send(self, request: HttpRequest) -> Reply:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, APIConnectionError):
            raise answer
        return answer

    def stream(self, request: HttpRequest):
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True


def json_reply(body: bytes | str, status: int = 200, **headers: str) -> Reply:
    data = body.encode() if isinstance(body, str) else body
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, {"content-length": str(len(data)), **names}, data)


class StillClock:
    """A clock whose sleeps take no time but are remembered."""

    def __init__(self, now: float = 0.0) -> None:
        self.time = now
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time + 1_750_000_000.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.sleeps.append(seconds)
        self.time += seconds
