"""An ASGI app as the other end, in the caller's own loop: no sockets, threads or lifespan.

Behaves as a socket would: a time-out (on the given clock) is an `APITimeoutError`, an app that
stops in the middle of a reply is a broken connection. A caller that goes away cancels the app's
call, the sharpest thing a disconnect can do.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import anyio

from tinkex import urls
from tinkex.clock import SystemClock, time_limit
from tinkex.errors import APIConnectionError, APITimeoutError, RequestInfo
from tinkex.transport.base import HttpRequest, Reply, StreamedReply
from tinkex.transport.decode import decode_body, decode_chunks
from tinkex.transport.http_connection import BrokenReply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from tinkex.clock import Clock

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class AsgiTransport:
    """A `Transport` that calls `app` directly."""

    def __init__(
        self, app: AsgiApp, base_url: str = "http://app.invalid", clock: Clock | None = None
    ) -> None:
        self._app = app
        self._base = urls.parse(base_url)
        self._clock = clock or SystemClock()

    async def send(self, request: HttpRequest) -> Reply:
        """One call of the app; its reply counts as soon as it is complete."""
        exchange = _Exchange(request)
        async with time_limit(self._clock, request.timeout_s) as limit:
            # Kept inside: an error leaving the block would come out as a group of errors.
            await exchange.run(self._app, self._scope(request))
        if limit.expired and not exchange.complete:
            raise self._timed_out(request)
        if exchange.broken is not None:
            raise self._broken(request, exchange.broken) from exchange.error
        body = bytes(exchange.body)
        encoding = exchange.headers.get("content-encoding")
        if encoding is not None:
            try:
                body = decode_body(encoding, body)
            except BrokenReply as error:
                raise self._broken(request, str(error)) from error
        return Reply(exchange.status, exchange.headers, body)

    @asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncGenerator[StreamedReply]:
        """One call of the app whose body is read as it comes; leaving early cancels the call."""
        pieces, arriving = anyio.create_memory_object_stream[bytes](0)
        exchange = _StreamedExchange(request, pieces)
        failure: Exception | None = None

        async def run() -> None:
            with pieces:
                await exchange.run(self._app, self._scope(request))
                exchange.started.set()

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                yield await self._streamed(request, exchange, arriving)
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                failure = error
            group.cancel_scope.cancel()
            arriving.close()
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        """Nothing to close."""

    async def _streamed(
        self,
        request: HttpRequest,
        exchange: _StreamedExchange,
        arriving: MemoryObjectReceiveStream[bytes],
    ) -> StreamedReply:
        async with time_limit(self._clock, request.timeout_s) as limit:
            await exchange.started.wait()
        if limit.expired and not exchange.started.is_set():
            raise self._timed_out(request)
        if not exchange.status:
            raise self._broken(request, exchange.broken or "") from exchange.error

        return StreamedReply(
            exchange.status, exchange.headers, self._chunks(request, exchange, arriving)
        )

    async def _chunks(
        self,
        request: HttpRequest,
        exchange: _StreamedExchange,
        arriving: MemoryObjectReceiveStream[bytes],
    ) -> AsyncGenerator[bytes]:
        encoding = exchange.headers.get("content-encoding")
        try:
            async for chunk in decode_chunks(encoding, self._pieces(request, arriving)):
                yield chunk
        except BrokenReply as error:
            raise self._broken(request, str(error)) from error
        if exchange.broken is not None:
            raise self._broken(request, exchange.broken) from exchange.error

    async def _pieces(
        self, request: HttpRequest, arriving: MemoryObjectReceiveStream[bytes]
    ) -> AsyncGenerator[bytes]:
        """The body as the app sends it; each silence is bounded by the request's time-out."""
        while True:
            piece = b""
            async with time_limit(self._clock, request.timeout_s) as silence:
                try:
                    piece = await arriving.receive()
                except anyio.EndOfStream:
                    return
            if silence.expired and not piece:
                raise self._timed_out(request)
            yield piece

    def _scope(self, request: HttpRequest) -> dict[str, Any]:
        base = self._base
        raw_path = base.target(request.path)
        headers = [(b"host", base.authority.encode())]
        headers += [(k.lower().encode(), v.encode("latin-1")) for k, v in request.headers.items()]
        if request.body is not None or request.method != "GET":
            headers.append((b"content-length", str(len(request.body or b"")).encode()))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": base.scheme,
            "path": unquote(raw_path),
            "raw_path": raw_path.encode(),
            "root_path": base.path,
            "query_string": request.query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": (base.host, base.port),
        }

    def _info(self, request: HttpRequest) -> RequestInfo:
        return RequestInfo(request.method, urls.join(self._base, request.path, request.query))

    def _timed_out(self, request: HttpRequest) -> APITimeoutError:
        return APITimeoutError(
            self._info(request),
            f"{self._base} accepted the request but gave no complete reply within "
            f"{request.timeout_s:g} s.",
        )

    def _broken(self, request: HttpRequest, how: str) -> APIConnectionError:
        return APIConnectionError(
            self._info(request), f"The reply of {self._base} is unusable: {how}."
        )


class CapturedReply:
    """What an app has sent so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False

    async def send(self, message: Message) -> None:
        """The `send` that the app is called with."""
        if message["type"] == "http.response.start":
            self.status = cast("int", message["status"])
            for name, value in cast("list[tuple[bytes, bytes]]", message.get("headers", [])):
                key, text = name.decode("latin-1").lower(), value.decode("latin-1")
                self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
            await self.on_start()
        elif message["type"] == "http.response.body" and not self.complete:
            await self.on_body(bytes(message.get("body", b"")))
            self.complete = not message.get("more_body", False)

    async def on_start(self) -> None:
        """The head is there."""

    async def on_body(self, chunk: bytes) -> None:
        """Another part of the body is there."""
        self.body += chunk


class _Exchange(CapturedReply):
    """One call of an app: what it sent, and how it ended."""

    def __init__(self, request: HttpRequest) -> None:
        super().__init__()
        self._request = request
        self._body_given = False
        self.error: Exception | None = None

    async def run(self, app: AsgiApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - the app's call ends here; see `broken`
            self.error = error
        if not self.status and not isinstance(self.error, OSError):
            # What a real server says for an app that fails before it answers.
            self.status = 500
            self.headers = {"content-type": "text/plain", "content-length": "21"}
            await self.on_start()
            await self.on_body(b"Internal Server Error")
            self.complete = True

    @property
    def broken(self) -> str | None:
        """Why there is no whole reply, if so; an OSError stands for a connection that drops."""
        if self.complete:
            return None
        if self.status:
            return "the connection closed in the middle of the answer"
        return f"the connection dropped ({self.error})"

    async def receive(self) -> Message:
        if not self._body_given:
            self._body_given = True
            body = self._request.body or b""
            return {"type": "http.request", "body": body, "more_body": False}
        # The caller is still there; when it goes away this call is cancelled.
        await anyio.sleep_forever()
        raise AssertionError("unreachable")


class _StreamedExchange(_Exchange):
    """The same, with the body handed on as it comes."""

    def __init__(self, request: HttpRequest, pieces: MemoryObjectSendStream[bytes]) -> None:
        super().__init__(request)
        self._pieces = pieces
        self.started = anyio.Event()

    async def on_start(self) -> None:
        self.started.set()

    async def on_body(self, chunk: bytes) -> None:
        if chunk:
            await self._pieces.send(chunk)
