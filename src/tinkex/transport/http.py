"""Sockets: each kind of traffic has connections of its own, and one carries one request at a time.

Owns the pools, the spelling of a request on the wire, and the translation of everything that can
go wrong into `APIConnectionError` and `APITimeoutError`. HTTP/1.1 only; no retries.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from tinkex.clock import SystemClock
from tinkex.errors import APIConnectionError, APITimeoutError, InputError, RequestInfo
from tinkex.transport import urls
from tinkex.transport.base import Pool, Reply, Request, StreamedReply
from tinkex.transport.connection import BrokenReply
from tinkex.transport.decode import decode_body, decode_chunks
from tinkex.transport.pool import ConnectionPool, ConnectTimeout, Dialer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from tinkex.clock import Clock

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
# What may be said to another server than the one the user chose.
_PORTABLE_HEADERS = frozenset({"accept", "accept-encoding", "user-agent"})
_MAX_CONNECTIONS = 2048


class HttpTransport:
    """A `Transport` over sockets; belongs to the event loop that uses it first."""

    def __init__(
        self,
        base_url: str,
        clock: Clock | None = None,
        *,
        connect_timeout_s: float = 4.0,
        ssl_context: ssl.SSLContext | None = None,
        max_connections: int | None = None,
    ) -> None:
        # Mutable state: the pools, and the process and loop they belong to.
        self._base = urls.parse(base_url)
        self._clock = clock or SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._ssl_context = ssl_context
        self._max_connections = max_connections or _connection_limit()
        self._dialers: dict[str, Dialer] = {}
        self._pools: dict[tuple[str, Pool], ConnectionPool] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._left_behind: list[object] = []

    async def send(self, request: Request) -> Reply:
        """One exchange; the time-out starts when a connection is free."""
        head = _head(request, self._base.target(request.path, request.query), self._base.authority)
        try:
            reply = await self._exchange(request, self._base, head)
            if request.follow_redirects and reply.status in _REDIRECTS:
                reply = await self._follow(request, reply)
        except (OSError, BrokenReply) as error:  # TimeoutError and ssl.SSLError are OSErrors
            raise self._translate(error, request) from error
        return reply

    async def _exchange(self, request: Request, base: urls.BaseUrl, head: bytes) -> Reply:
        pool = self._pool(base, request.pool)
        connection = await pool.take()
        try:
            status, headers, body = await connection.send(head, request.body, request.timeout_s)
        finally:
            pool.give_back(connection)
        encoding = headers.get("content-encoding")
        if encoding is not None:
            body = decode_body(encoding, body)
        return Reply(status, headers, body)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[StreamedReply]:
        """One exchange whose body is read as it comes; leaving early closes the connection."""
        head = _head(request, self._base.target(request.path, request.query), self._base.authority)
        pool = self._pool(self._base, request.pool)
        try:
            connection = await pool.take()
        except OSError as error:
            raise self._translate(error, request) from error
        ended = False

        async def chunks() -> AsyncGenerator[bytes]:
            nonlocal ended
            try:
                async for chunk in decode_chunks(headers.get("content-encoding"), sink):
                    yield chunk
            except (OSError, BrokenReply) as error:
                raise self._translate(error, request) from error
            ended = True

        try:
            try:
                status, headers, sink = await connection.stream(
                    head, request.body, request.timeout_s
                )
            except (OSError, BrokenReply) as error:
                raise self._translate(error, request) from error
            body = chunks()
            try:
                yield StreamedReply(status, headers, body)
            finally:
                await body.aclose()
        finally:
            if not ended:
                connection.abort()
            pool.give_back(connection)

    async def aclose(self) -> None:
        """Close idle connections; exchanges under way are not waited for."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, base: urls.BaseUrl, kind: Pool) -> ConnectionPool:
        home = (os.getpid(), asyncio.get_running_loop())
        if home != self._home:
            self._move_in(home)
        key = (urls.pool_key(base), kind)
        pool = self._pools.get(key)
        if pool is None:
            dialer = self._dialers.get(key[0])
            if dialer is None:
                dialer = Dialer(base, self._clock, self._connect_timeout_s, self._ssl_context)
                self._dialers[key[0]] = dialer
            pool = ConnectionPool(dialer, self._clock, self._max_connections)
            self._pools[key] = pool
        return pool

    def _move_in(self, home: tuple[int, asyncio.AbstractEventLoop]) -> None:
        """Start afresh in a forked child or on another loop.

        Sockets of the old home are neither used nor closed here: the parent may still be
        talking on them, so they are kept from the garbage collector.
        """
        if self._home is not None:
            self._left_behind.extend((self._home[1], self._pools, self._dialers))
        self._home = home
        self._pools, self._dialers = {}, {}

    async def _follow(self, request: Request, reply: Reply) -> Reply:
        """Follow redirects of a read; another server hears no credentials."""
        here = self._base.origin + self._base.target(request.path, request.query)
        for _ in range(_MAX_REDIRECTS):
            try:
                here = urljoin(here, reply.headers.get("location", ""))
                parts = urlsplit(here)
                base = urls.parse(f"{parts.scheme}://{parts.netloc}", setting="location")
            except ValueError as error:  # InputError is one
                raise BrokenReply("the server redirects to something that is no URL") from error
            if self._base.secure and not base.secure:
                raise BrokenReply("the server redirects to an address that is not https")
            headers = request.headers
            if base.origin != self._base.origin:
                headers = {k: v for k, v in headers.items() if k.lower() in _PORTABLE_HEADERS}
            target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            hop = Request("GET", parts.path, request.pool, request.timeout_s, headers=headers)
            reply = await self._exchange(hop, base, _head(hop, target, base.authority))
            if reply.status not in _REDIRECTS:
                return reply
        raise BrokenReply(f"the server redirects more than {_MAX_REDIRECTS} times")

    def _translate(self, error: Exception, request: Request) -> APIConnectionError:
        url = urls.join(self._base, request.path, request.query)
        info = RequestInfo(request.method, url)
        message = describe(error, str(self._base))
        if isinstance(error, TimeoutError) and error.errno is None:
            return APITimeoutError(info, message)
        return APIConnectionError(info, message)


def describe(error: Exception, base_url: str) -> str:
    """What went wrong and what to do about it, in one line."""
    where = "check that the server runs and that TINKER_BASE_URL (or base_url=) is right"
    match error:
        case ConnectionRefusedError():
            return f"Nothing listens at {base_url} (connection refused); {where}."
        case ConnectTimeout():
            return f"{base_url} did not accept a connection in time ({error}); {where}."
        case socket.gaierror():
            return f"The host name of {base_url} cannot be resolved ({error.strerror}); {where}."
        case ssl.SSLCertVerificationError():
            return (
                f"The certificate of {base_url} was refused ({error.verify_message}); check the "
                "host name, or point SSL_CERT_FILE at your authority's certificates."
            )
        case ssl.SSLError():
            return (
                f"No TLS connection with {base_url} ({error.reason or error}); does the server "
                "speak https on this port?"
            )
        case OSError() if error.errno in (errno.EMFILE, errno.ENFILE):
            return "This process has too many open files; raise the limit (`ulimit -n`)."
        case TimeoutError() if error.errno is None:
            return f"{base_url} accepted the request but gave {error}."
        case BrokenReply():
            return f"The reply of {base_url} is unusable: {error}."
        case _:
            return f"The connection to {base_url} broke ({error}); it may work when tried again."


def _head(request: Request, target: str, authority: str) -> bytes:
    """Request line and headers; raises InputError, naming no value, for what cannot be sent."""
    lines = [f"{request.method} {target} HTTP/1.1\r\nHost: {authority}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    if request.body is not None:
        lines.append(f"Content-Length: {len(request.body)}\r\n\r\n")
    elif request.method == "GET":
        lines.append("\r\n")
    else:
        lines.append("Content-Length: 0\r\n\r\n")
    text = "".join(lines)
    # Request line, Host and the last line bring breaks of their own; any other is an injection.
    breaks = len(request.headers) + (3 if request.body is None and request.method == "GET" else 4)
    try:
        head = text.encode("ascii")
    except UnicodeEncodeError:
        head = b""
    if not head or text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text:
        raise InputError(_culprit(request.headers), "headers")
    return head


def _culprit(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        text = f"{name}{value}"
        if not text.isascii() or any(char in text for char in "\r\n\0"):
            return f"the value of {name!r} must be one line of ASCII text"
    return "the path must be one line of ASCII text"


def _connection_limit() -> int:
    """Connections of one pool: enough for long polls, and a share of what the process may open."""
    try:
        import resource
    except ImportError:  # Windows, where sockets do not count as files
        return _MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(16, min(_MAX_CONNECTIONS, soft // 3))
