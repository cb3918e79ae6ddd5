"""Connections to one origin for one kind of traffic: opened when needed, kept, never shared.

Owns the idle connections, the limit on how many exist, and how one is opened (addresses, TLS, the
tunnel through a proxy).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any

from tinkex.transport.http_connection import BrokenReply, HttpConnection
from tinkex.transport.proxy_failure import ProxyFailure

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinkex.clock import Clock
    from tinkex.proxy import Proxy
    from tinkex.urls import BaseUrl

# Shorter than the idle time-out of common load balancers (60 s), so that they rarely close first.
_IDLE_S = 50.0
_ADDRESSES_FRESH_S = 30.0

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class ConnectTimeout(TimeoutError):
    """No connection within the connect time-out."""


class Dialer:
    """Opens connections to one origin, through `proxy` if there is one.

    Remembers the addresses of the host it dials for a while, the good one first.
    """

    def __init__(
        self,
        base: BaseUrl,
        clock: Clock,
        connect_timeout_s: float,
        ssl_context: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        # Mutable state: the addresses and when they were looked up, and the TLS settings.
        self._base = base
        self._proxy = proxy
        self._dialled = base if proxy is None else proxy.address
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._ssl_context = ssl_context
        self._addresses: list[Address] = []
        self._looked_up = float("-inf")
        self._lock = asyncio.Lock()

    async def open(self) -> HttpConnection:
        """A fresh connection; raises OSError: ConnectTimeout and ProxyFailure are two of them."""
        if self._proxy is None:
            return await self._in_time(self._reach())
        try:
            connection = await self._in_time(self._reach_through(self._proxy))
        except ProxyFailure:
            raise
        except (OSError, BrokenReply) as error:
            raise ProxyFailure(self._proxy, error) from error
        # From here on the server answers, so failures are its own.
        return await self._in_time(self._secure(connection)) if self._base.secure else connection

    async def _in_time(self, opening: Coroutine[Any, Any, HttpConnection]) -> HttpConnection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await opening
        except TimeoutError as error:
            if isinstance(error, ConnectTimeout):
                raise
            raise ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s") from None

    async def _reach_through(self, proxy: Proxy) -> HttpConnection:
        """A connection to the proxy, which forwards what is sent on it: a tunnel for https."""
        connection = await self._reach()
        if self._base.secure:
            status = await connection.open_tunnel(
                self._base.host_and_port, proxy.authorization, self._connect_timeout_s
            )
            if not 200 <= status < 300:
                connection.abort()
                raise ProxyFailure(proxy, status)
        return connection

    async def _secure(self, tunnel: HttpConnection) -> HttpConnection:
        try:
            return await tunnel.start_tls(await self._tls(), self._base.host)
        except BaseException:
            tunnel.abort()
            raise

    async def _reach(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        context = await self._tls() if self._dialled.secure else None
        sock = await self._dial(loop)
        try:
            _, connection = await loop.create_connection(
                lambda: HttpConnection(loop),
                sock=sock,
                ssl=context,
                server_hostname=self._dialled.host if context else None,
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _dial(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        addresses = await self._resolve(loop)
        failure: OSError = OSError(f"{self._dialled.host} has no address")
        for address in addresses:
            try:
                # One dead address must not use up the time of the others.
                async with asyncio.timeout(self._connect_timeout_s / len(addresses)):
                    sock = await _connect(loop, address)
            except TimeoutError:
                failure = ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s")
            except OSError as error:
                failure = error
            else:
                if address is not addresses[0]:
                    self._addresses = [address, *(a for a in addresses if a is not address)]
                return sock
        self._looked_up = float("-inf")
        raise failure

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[Address]:
        if self._clock.now() - self._looked_up < _ADDRESSES_FRESH_S:
            return self._addresses
        host, port = self._dialled.host, self._dialled.port
        if (literal := _literal(host, port)) is not None:
            return [literal]
        async with self._lock:  # a burst of connections asks the resolver once
            if self._clock.now() - self._looked_up >= _ADDRESSES_FRESH_S:
                try:
                    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                except RuntimeError:
                    # The process is ending and starts no threads, of which the resolver needs
                    # one. What it found last is good enough for the last request.
                    return self._addresses
                self._addresses = [(family, address) for family, _, _, _, address in found]
                self._looked_up = self._clock.now()
        return self._addresses

    async def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            async with self._lock:
                if self._ssl_context is None:
                    # Reads a few hundred certificates from disk.
                    self._ssl_context = await asyncio.to_thread(_default_tls)
        return self._ssl_context


class ConnectionPool:
    """Up to `limit` connections; a caller past it waits its turn, in order."""

    def __init__(self, dialer: Dialer, clock: Clock, limit: int) -> None:
        # Mutable state: idle connections (last used on top), free places, the callers that wait
        # for one, and whether the pool is closed.
        self._dialer = dialer
        self._clock = clock
        self._idle: list[HttpConnection] = []
        self._free = limit
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    async def take(self) -> HttpConnection:
        """A connection for one exchange; `give_back` must follow."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait_turn()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            if self._clock.now() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        try:
            return await self._dialer.open()
        except BaseException:
            self._leave()
            raise

    def give_back(self, connection: HttpConnection) -> None:
        """Keep it when it can carry another exchange, and admit the next caller."""
        if connection.reusable and not self._closed:
            connection.idle_since = self._clock.now()
            self._idle.append(connection)
        else:
            connection.abort()
        if self._waiters:
            self._leave()
        else:
            self._free += 1

    async def _wait_turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place was given while the caller was being cancelled
            raise

    def _leave(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        """Close what is idle; connections in use close when their exchange ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


async def _connect(loop: asyncio.AbstractEventLoop, address: Address) -> socket.socket:
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # Long polls are silent for most of a minute; this keeps the entries of NAT tables alive.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _literal(host: str, port: int) -> Address | None:
    """The address itself when `host` is one: nothing to look up."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family, (host, port)
    return None


def _default_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and not ssl.get_default_verify_paths().capath:
        # Some Python builds come without the system's certificates.
        with contextlib.suppress(ImportError):
            import certifi  # pyright: ignore[reportMissingImports] - only where it is installed

            context.load_verify_locations(certifi.where())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    context.set_alpn_protocols(["http/1.1"])
    return context
