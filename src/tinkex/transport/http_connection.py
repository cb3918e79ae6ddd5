"""One socket: HTTP/1.1 on asyncio, parsed by httptools (llhttp, in C).

An `HttpConnection` carries one request at a time and knows nothing of pools, retries or headers'
meaning. It raises `OSError`, `TimeoutError` and `BrokenReply`; `http.py` translates them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterable, AsyncIterator

# No server needs more for its headers; without a limit a reply could fill the memory.
MAX_HEAD_BYTES = 256 * 1024
# How far a streamed reply may run ahead of its reader.
_STREAM_AHEAD_BYTES = 256 * 1024
# A reply may take longer than its timeout as long as bytes keep coming, but not for ever.
_TOTAL_FACTOR = 10
# Small bodies travel in one segment with their head; large ones are not copied for that.
_ONE_WRITE_BYTES = 64 * 1024
# A large body is handed to the socket in pieces, so that bytes that leave count as progress.
_PIECE_BYTES = 256 * 1024


class BrokenReply(Exception):
    """What came back is not a whole HTTP reply; the text says in what way."""


class HttpConnection(asyncio.Protocol):
    """A keep-alive connection; `send` or `stream` may be called when the last one has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Mutable state: the socket, the parser, and everything about the exchange under way.
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.reusable = True
        self.idle_since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._started = 0.0
        self._done: asyncio.Future[None] | None = None
        self._head_done: asyncio.Future[None] | None = None
        self._head_complete = False
        self._headers: dict[str, str] = {}
        self._sink: Stream | None = None
        self._write_paused = False
        self._writable: asyncio.Future[None] | None = None

    # -- one exchange -------------------------------------------------------------------------

    async def send(
        self, head: bytes, body: bytes | None, timeout_s: float
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower-case names) and the body as it was sent."""
        done = self._begin(head, body)
        # Have `_check` called in time. An alarm outlives its exchange: the next one uses it.
        self._timeout_s = timeout_s
        self._started = self._loop.time()
        due = self._started + timeout_s
        if self._alarm is None or self._alarm.when() > due:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(due, self._check)
        try:
            await done
        except BaseException:
            self.abort()
            raise
        parts = self._body
        return self._status, self._headers, parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream(
        self, head: bytes, body: bytes | AsyncIterable[bytes] | None, timeout_s: float
    ) -> tuple[int, dict[str, str], Stream]:
        """Status and headers as soon as they are there; `timeout_s` bounds each silence.

        A body that comes in parts is written as it comes, and is framed by its caller. An answer
        that does not wait for all of it ends the writing; the connection then is not used again.
        """
        whole = body is None or (isinstance(body, bytes) and len(body) < _PIECE_BYTES)
        done = self._begin(head, body if isinstance(body, bytes) and whole else None)
        if done.done():
            await done  # closed while idle: raises at once, no head will come
        sink = self._sink = Stream(self._loop, self, timeout_s)
        head_done = self._head_done = self._loop.create_future()
        done.add_done_callback(lambda _: sink.end(None if done.cancelled() else done.exception()))
        try:
            if not whole and body is not None:
                await self._upload(_pieces(body) if isinstance(body, bytes) else body, timeout_s)
            async with asyncio.timeout(timeout_s):
                await head_done
        except BaseException:
            self.abort()
            if not head_done.cancel() and not head_done.cancelled():
                head_done.exception()  # what ended the writing is raised instead
            raise
        return self._status, self._headers, sink

    async def _upload(self, parts: AsyncIterable[bytes], timeout_s: float) -> None:
        head_done, self._uploading = self._head_done, True
        async for part in parts:
            if self._write_paused:
                self._writable = self._loop.create_future()
                async with asyncio.timeout(timeout_s):
                    await self._writable
            if self._transport is None or head_done is None or head_done.done():
                return  # answered, or broken, before all of it was written
            self._transport.write(part)
        self._uploading = False

    def _begin(self, head: bytes, body: bytes | None) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        self._done = done
        self._head_done = None
        self._status = 0
        self._headers = {}
        self._head_bytes = 0
        self._head_complete = False
        self._keep_alive = False
        self._body: list[bytes] = []
        self._sink = None
        self._last_progress = 0.0
        self._unsent = 0
        self._uploading = False
        transport = self._transport
        if transport is None or transport.is_closing():
            self.reusable = False
            done.set_exception(ConnectionResetError("the connection was closed while idle"))
            return done
        self._last_progress = self._loop.time()
        if body is None:
            transport.write(head)
        elif len(body) < _ONE_WRITE_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return done

    def _check(self) -> None:
        """Time out unless bytes have moved; called when the time could be up."""
        self._alarm, done = None, self._done
        if done is None or done.done() or self._sink is not None:
            return  # nothing under way, or a stream, whose reader watches the time
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size() if self._transport else 0
        if unsent < self._unsent or (unsent and not self._unsent):
            self._last_progress = now
        self._unsent = unsent
        due = min(
            self._last_progress + self._timeout_s,
            self._started + self._timeout_s * _TOTAL_FACTOR,
        )
        if due > now:
            self._alarm = self._loop.call_at(due, self._check)
        else:
            done.set_exception(TimeoutError(f"no complete reply within {self._timeout_s:g} s"))

    @property
    def answered(self) -> bool:
        """Whether the whole reply has arrived, or has failed."""
        return self._done is not None and self._done.done()

    def abort(self) -> None:
        """Close at once; the exchange under way fails."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading until `resume`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- through a proxy ----------------------------------------------------------------------

    async def open_tunnel(self, target: str, authorization: str | None, timeout_s: float) -> int:
        """Ask the proxy at the other end for a connection to `target`; returns its status."""
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if authorization is not None:
            lines.append(f"Proxy-Authorization: {authorization}")
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        # Streamed, because the answer to CONNECT has no body: what follows is the tunnel.
        status, _, _ = await self.stream(head, None, timeout_s)
        return status

    async def start_tls(self, context: ssl.SSLContext, host: str) -> HttpConnection:
        """A connection inside the tunnel, encrypted for `host`; this one is used up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the proxy closed the tunnel")
        inner = HttpConnection(self._loop)
        secured = await self._loop.start_tls(transport, inner, context, server_hostname=host)
        if secured is None:
            raise ConnectionResetError("the proxy closed the tunnel")
        inner.connection_made(secured)
        return inner

    # -- asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.abort()  # no request is open: these bytes could be taken for the next reply
            return
        self._last_progress = self._loop.time()
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BrokenReply(f"the answer is not valid HTTP ({error})"))
            return
        if not self._head_complete and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(BrokenReply("the headers of the answer do not end"))

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def eof_received(self) -> bool:
        self.reusable = False
        return False  # close; connection_lost decides what it means

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._transport = None
        self._wake_writer()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._done is None or self._done.done():
            return
        if self._ends_with_connection() and exc is None:
            self._done.set_result(None)
        elif exc is not None:
            self._fail(exc)
        elif self._head_complete:
            self._fail(BrokenReply("the connection closed in the middle of the answer"))
        else:
            self._fail(ConnectionResetError("the connection was closed without an answer"))

    def _ends_with_connection(self) -> bool:
        return (
            self._head_complete
            and "content-length" not in self._headers
            and "transfer-encoding" not in self._headers
        )

    def _fail(self, error: Exception) -> None:
        self.reusable = False
        for future in (self._head_done, self._done):
            if future is not None and not future.done():
                future.set_exception(error)
        if self._head_done is not None:
            assert self._done is not None
            self._done.exception()  # the reader of a stream gets it from the stream
        self.abort()

    # -- httptools ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._done is not None and self._done.done():
            self.reusable = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # trailers
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in self._headers:
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        if self._done is None or self._done.done():
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return
        self._head_complete = True
        # Asked for now: llhttp forgets it once the message is complete.
        self._keep_alive = self._parser.should_keep_alive()
        if self._head_done is not None and not self._head_done.done():
            self._head_done.set_result(None)
        self._wake_writer()

    def on_body(self, chunk: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if self._sink is not None:
            self._sink.push(chunk)
        else:
            self._body.append(chunk)

    def on_message_complete(self) -> None:
        if self._done is None or self._done.done():
            return
        if not self._head_complete:  # 1xx: the real answer follows
            self._headers = {}
            return
        # An answer that did not wait for the whole request leaves the rest of it in the way.
        unsent = self._transport.get_write_buffer_size() if self._transport else 0
        self.reusable = self.reusable and self._keep_alive and not unsent and not self._uploading
        self._done.set_result(None)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(view), _PIECE_BYTES):
        # asyncio takes any buffer; slices of bytes would be copies.
        yield cast("bytes", view[start : start + _PIECE_BYTES])


class Stream:
    """The body of a streamed reply; ends with the reply or with what broke it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: HttpConnection, silence_s: float
    ) -> None:
        # Mutable state: chunks not read yet, the reader's wake-up, and how it ended.
        self._loop = loop
        self._connection = connection
        self._silence_s = silence_s
        self._chunks: deque[bytes] = deque()
        self._ahead = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: BaseException | None = None

    def push(self, chunk: bytes) -> None:
        """From the parser: more body."""
        self._chunks.append(chunk)
        self._ahead += len(chunk)
        if self._ahead > _STREAM_AHEAD_BYTES:
            self._connection.pause()
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """From the connection: nothing more comes."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._ahead -= len(chunk)
                if self._ahead <= _STREAM_AHEAD_BYTES // 2:
                    self._connection.resume()
                yield chunk
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._waiter = self._loop.create_future()
            async with asyncio.timeout(self._silence_s):
                await self._waiter
