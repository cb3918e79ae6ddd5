"""Sockets: each kind of traffic has connections of its own, and one carries one request at a time.

Owns the pools, the spelling of a request on the wire, and the translation of everything that can
go wrong into `APIConnectionError`, `APITimeoutError` and `ProxyError`. HTTP/1.1 only; no retries.

A proxy is asked for a tunnel to an https server, and is sent the whole request for an http one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from tinkex import proxy as proxies
from tinkex import urls
from tinkex.clock import SystemClock
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    InputError,
    ProxyError,
    RequestInfo,
)
from tinkex.transport.base import HttpRequest, Pool, Reply, StreamedReply
from tinkex.transport.decode import decode_body, decode_chunks
from tinkex.transport.http_connection import BrokenReply
from tinkex.transport.pool import ConnectionPool, ConnectTimeout, Dialer
from tinkex.transport.proxy_failure import ProxyFailure, refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from tinkex.clock import Clock
    from tinkex.proxy import Proxy, ProxyRules

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
# The only headers that are sent to a server that the user did not choose.
_PORTABLE_HEADERS = frozenset({"accept", "accept-encoding", "user-agent"})
_MAX_CONNECTIONS = 2048


@dataclass(frozen=True, slots=True)
class Origin:
    """One server, and the proxy that its requests go through if there is one.

    `key` names the connections that may be shared, `authority` is the Host header, and `forwarder`
    is the proxy where it is sent whole requests instead of being asked for a tunnel.
    """

    base: urls.BaseUrl
    proxy: Proxy | None
    key: str
    authority: str
    forwarder: Proxy | None

    @classmethod
    def of(cls, base: urls.BaseUrl, rules: ProxyRules) -> Origin:
        proxy = rules.choose(base)
        return cls(base, proxy, base.origin, base.authority, None if base.secure else proxy)

    def __str__(self) -> str:
        return str(self.base) if self.proxy is None else f"{self.base} (through {self.proxy})"


class HttpTransport:
    """A `Transport` over sockets; belongs to the event loop that uses it first.

    `proxy` is the URL of one for every request, or rules that choose one per origin.
    """

    def __init__(
        self,
        base_url: str,
        clock: Clock | None = None,
        *,
        connect_timeout_s: float = 4.0,
        ssl_context: ssl.SSLContext | None = None,
        max_connections: int | None = None,
        proxy: ProxyRules | str | None = None,
    ) -> None:
        # Mutable state: the pools, and the process and loop they belong to.
        self._base = urls.parse(base_url)
        self._rules = proxies.rules(proxy)
        self._origin = Origin.of(self._base, self._rules)
        self._clock = clock or SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._ssl_context = ssl_context
        self._max_connections = max_connections or _connection_limit()
        self._dialers: dict[str, Dialer] = {}
        self._pools: dict[tuple[str, Pool], ConnectionPool] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._left_behind: list[object] = []

    async def send(self, request: HttpRequest) -> Reply:
        """One exchange; the time-out starts when a connection is free."""
        origin = self._origin
        try:
            reply = await self._exchange(request, origin, _head(request, origin))
            if request.follow_redirects and reply.status in REDIRECTS:
                reply = await self._follow(request, reply)
        except (OSError, BrokenReply) as error:  # TimeoutError and ssl.SSLError are OSErrors
            raise self._translate(error, request) from error
        return reply

    async def _exchange(self, request: HttpRequest, origin: Origin, head: bytes) -> Reply:
        pool = self._pool(origin, request.pool)
        connection = await pool.take()
        try:
            status, headers, body = await connection.send(head, request.body, request.timeout_s)
        finally:
            pool.give_back(connection)
        encoding = headers.get("content-encoding")
        if encoding is not None:
            body = decode_body(encoding, body)
        if origin.forwarder is not None:
            _check_forwarded(origin.forwarder, status, headers)
        return Reply(status, headers, body)

    @asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncGenerator[StreamedReply]:
        """One exchange whose body is read as it comes; leaving early closes the connection."""
        origin = self._origin
        head = _head(request, origin)
        pool = self._pool(origin, request.pool)
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
                if origin.forwarder is not None:
                    _check_forwarded(origin.forwarder, status, headers)
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

    def _pool(self, origin: Origin, kind: Pool) -> ConnectionPool:
        home = (os.getpid(), asyncio.get_running_loop())
        if home != self._home:
            self._move_in(home)
        # The rules never change, so an origin has one proxy at most.
        pool = self._pools.get((origin.key, kind))
        if pool is None:
            dialer = self._dialers.get(origin.key)
            if dialer is None:
                dialer = self._dialers[origin.key] = Dialer(
                    origin.base,
                    self._clock,
                    self._connect_timeout_s,
                    self._ssl_context,
                    origin.proxy,
                )
            pool = ConnectionPool(dialer, self._clock, self._max_connections)
            self._pools[origin.key, kind] = pool
        return pool

    def _move_in(self, home: tuple[int, asyncio.AbstractEventLoop]) -> None:
        """Start afresh in a forked child or on another loop.

        Sockets of the old home are neither used nor closed here: the parent may still be
        using them, so they are kept from the garbage collector.
        """
        if self._home is not None:
            self._left_behind.extend((self._home[1], self._pools, self._dialers))
        self._home = home
        self._pools, self._dialers = {}, {}

    async def _follow(self, request: HttpRequest, reply: Reply) -> Reply:
        """Follow redirects of a read; another server is sent no credentials."""
        here = self._base.origin + self._base.target(request.path, request.query)
        for _ in range(MAX_REDIRECTS):
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
            hop = HttpRequest("GET", parts.path, request.pool, request.timeout_s, headers=headers)
            origin = Origin.of(base, self._rules)
            reply = await self._exchange(hop, origin, _head(hop, origin, target))
            if reply.status not in REDIRECTS:
                return reply
        raise BrokenReply(f"the server redirects more than {MAX_REDIRECTS} times")

    def _translate(self, error: Exception, request: HttpRequest) -> APIError:
        url = urls.join(self._base, request.path, request.query)
        info = RequestInfo(request.method, url)
        if isinstance(error, ProxyFailure):
            return _proxy_error(error, info, str(self._base))
        message = describe(error, str(self._origin))
        if isinstance(error, TimeoutError) and error.errno is None:
            return APITimeoutError(info, message)
        return APIConnectionError(info, message)


def _proxy_error(failure: ProxyFailure, info: RequestInfo, server: str) -> APIError:
    message, problem = failure.describe(server), failure.problem
    if isinstance(problem, int) and failure.final:
        return ProxyError(message, info, status_code=problem)
    if isinstance(problem, TimeoutError) and problem.errno is None:
        return APITimeoutError(info, message)
    return APIConnectionError(info, message)


_CHECK = "check that the server runs and that TINKER_BASE_URL (or base_url=) is right"


def describe(error: Exception, base_url: str, where: str = _CHECK) -> str:
    """What went wrong and, with `where`, what to do about it, in one line."""
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


def _head(request: HttpRequest, origin: Origin, target: str | None = None) -> bytes:
    """Request line and headers; raises InputError, naming no value, for what cannot be sent.

    `target` replaces the request's path and query below the base URL.
    """
    if target is None:
        target = origin.base.path + request.path
        if request.query:
            target = f"{target}?{request.query}"
    # Request line, Host and the last line bring breaks of their own; any other is an injection.
    breaks, extra = len(request.headers) + 4, ""
    if origin.forwarder is not None:
        # The proxy needs the whole URL, and a credential of its own.
        target = origin.key + target
        if origin.forwarder.authorization is not None:
            extra = f"Proxy-Authorization: {origin.forwarder.authorization}\r\n"
            breaks += 1
    text = f"{request.method} {target} HTTP/1.1\r\n{extra}Host: {origin.authority}\r\n"
    for name, value in request.headers.items():
        text += f"{name}: {value}\r\n"
    if request.body is not None or request.method != "GET":
        text += f"Content-Length: {len(request.body or b'')}\r\n\r\n"
    else:
        text += "\r\n"
        breaks -= 1
    try:
        head = text.encode("ascii")
    except UnicodeEncodeError:
        head = b""
    if not head or text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text:
        raise InputError(_culprit(request.headers), "headers")
    return head


def _check_forwarded(proxy: Proxy, status: int, headers: Mapping[str, str]) -> None:
    failure = refusal(proxy, status, headers) if status >= 400 else None
    if failure is not None:
        raise failure


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
