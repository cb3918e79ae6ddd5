"""ASGI middleware that records every request and lets faults decide how it is answered."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from tinkex.errors import InputError
from tinkex.testing.asgi import CapturedReply
from tinkex.wire.compression import decompress
from tinkex.wire.json_codec import decode_object
from tinkex.wire.proto_training import decode_forward_backward
from tinkex.wire.routes import MEDIA_PROTOBUF, PREFIX, ROUTES

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from tinkex.clock import Clock
    from tinkex.testing.asgi import AsgiApp, Message, Receive, Send
    from tinkex.testing.fake_server import FakeServer

# Where a server that runs on sockets puts the function that breaks the connection.
ABORT = "tinkex.abort"

_SECRET_HEADERS = frozenset({"x-api-key", "authorization", "x-tinker-weights-access-token"})
_MAX_BODY_BYTES = 1 << 30


def _pattern(path: str) -> re.Pattern[str]:
    parts = [
        ".+" if part == "{ckpt}" else "[^/]+" if part.startswith("{") else re.escape(part)
        for part in path.split("/")
    ]
    return re.compile("/".join(parts).replace(".+", "[^/]+/[^/]+"))


_PATTERNS = [(route.method, _pattern(route.path), route.name) for route in ROUTES]


def route_name(method: str, path: str) -> str | None:
    """The name of the route a request goes to, below whatever prefix."""
    start = path.find(PREFIX + "/")
    below = path[start:] if start >= 0 else path
    return next((n for m, p, n in _PATTERNS if m == method and p.fullmatch(below)), None)


@dataclass(frozen=True)
class SeenRequest:
    """A request as it reached the server, without its credentials."""

    route: str | None
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    at: float
    raw_body: bytes = field(repr=False)

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body as plain values; empty when it is not a JSON object."""
        try:
            return decode_object(self.raw_body)
        except InputError:
            return {}

    @cached_property
    def body(self) -> Any:
        """The body decoded: a training batch, plain values, or bytes as they are."""
        if MEDIA_PROTOBUF in self.headers.get("content-type", ""):
            data = self.raw_body
            if self.headers.get("content-encoding") == "zstd":
                data = decompress(data, _MAX_BODY_BYTES)
            return decode_forward_backward(data)
        return self.json or self.raw_body


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, as an effect handles it."""

    server: FakeServer
    request: SeenRequest
    _app: AsgiApp
    _scope: MutableMapping[str, Any]
    _receive: Receive
    _send: Send

    @property
    def clock(self) -> Clock:
        """The server's clock."""
        return self.server.clock

    async def forward(self) -> None:
        """Let the app answer."""
        await self._app(dict(self._scope), self._replay(), self._send)

    async def capture(self) -> CapturedReply:
        """Let the app do its work and keep its answer from the client."""
        reply = CapturedReply()
        await self._app(dict(self._scope), self._replay(), reply.send)
        return reply

    async def answer(
        self, status: int, body: bytes, headers: Mapping[str, str], content_length: bool = True
    ) -> None:
        """Answer in the app's place."""
        kept = {k: v for k, v in headers.items() if k != "content-length"}
        if content_length:
            kept["content-length"] = str(len(body))
        await self.start(status, kept)
        await self.send_body(body, more=False)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer."""
        pairs = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def send_body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def gone(self) -> None:
        """Wait until the client goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def abort(self) -> None:
        """Break the connection: really on a socket, as an OSError in process."""
        abort = self._scope.get(ABORT)
        if abort is None:
            raise ConnectionResetError("scripted fault")
        abort()
        await self.gone()

    def _replay(self) -> Receive:
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                body = self.request.raw_body
                return {"type": "http.request", "body": body, "more_body": False}
            return await self._receive()

        return receive


class Recorder:
    """The outermost layer of a fake server's app."""

    def __init__(self, server: FakeServer, app: AsgiApp) -> None:
        self._server = server
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Record, ask the faults, pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = await self._read(scope, receive)
        if request is None:
            return
        if self._server.record:
            self._server.requests.append(request)
        exchange = Exchange(self._server, request, self._app, scope, receive, send)
        effect = self._server.faults.choose(request)
        if effect is None:
            await exchange.forward()
        else:
            await effect(exchange)

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> SeenRequest | None:
        received = Request(scope, receive)
        try:
            body = await received.body()
        except ClientDisconnect:
            return None
        method, path = received.method, str(scope["path"])
        return SeenRequest(
            route=route_name(method, path),
            method=method,
            path=path,
            query=bytes(scope.get("query_string", b"")).decode("latin-1"),
            headers={k: v for k, v in received.headers.items() if k not in _SECRET_HEADERS},
            at=self._server.clock.now(),
            raw_body=body,
        )
