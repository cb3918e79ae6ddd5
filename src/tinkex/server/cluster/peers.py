"""The connections of a node to the other nodes of its cluster.

Built on the SDK's connections (`tinkex.transport`), one layer below `HttpTransport`: that one
decodes bodies, while a request that is passed on must come back as it was sent. No proxies, no
redirects, no retries: the caller looks up who owns the key before it tries again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tinkex import urls
from tinkex.transport.http import describe
from tinkex.transport.http_connection import BrokenReply
from tinkex.transport.pool import ConnectionPool, Dialer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable

    from tinkex.clock import Clock
    from tinkex.server.store.ownership import Node
    from tinkex.transport.http_connection import HttpConnection, Stream

    Headers = Iterable[tuple[bytes, bytes]]
    Body = bytes | AsyncIterable[bytes] | None

CONNECT_TIMEOUT_S: Final = 4.0
# Longer than a node may hold a long poll.
_PATIENCE_S: Final = 30.0
# To one node; each poll that is passed on holds one of them.
_MAX_CONNECTIONS: Final = 4096
_WHERE: Final = "the node may have ended, or its URL in `tinkex cluster status` is wrong"


class NodeUnreachable(Exception):
    """A node gave no reply; it may have ended, or be cut off.

    `received` says whether it may have had the request. It is safe to send the request again only
    to the node that owns the key, which is to be looked up first.
    """

    def __init__(self, node: Node, reason: str, *, received: bool) -> None:
        super().__init__(f"node {node.name}: {reason}")
        self.node = node
        self.received = received


class BrokenOffError(Exception):
    """A node's reply ended in the middle."""


class PeerReply:
    """A reply whose head has arrived. `close` must follow."""

    def __init__(
        self,
        status: int,
        headers: dict[str, str],
        body: Stream,
        connection: HttpConnection,
        node: Node,
        release: Callable[[], None],
    ) -> None:
        self.status = status
        self.headers = headers
        # Mutable state: whether the connection was given back.
        self._body = body
        self._connection = connection
        self._node = node
        self._release = release
        self._closed = False

    @property
    def complete(self) -> bool:
        """Whether all of it has arrived, so that reading it does not wait."""
        return self._connection.answered

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it was sent; raises `BrokenOffError` when it does not come to its end."""
        try:
            async for chunk in self._body:
                yield chunk
        except (OSError, BrokenReply) as error:
            raise BrokenOffError(f"the reply of node {self._node.name} broke: {error}") from error

    async def read(self) -> bytes:
        """All of the body."""
        parts = [part async for part in self.chunks()]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or close it when the reply was not read to its end."""
        if self._closed:
            return
        self._closed = True
        if not self._connection.answered:
            self._connection.abort()
        self._release()


class Peers:
    """Sends requests to other nodes; belongs to the event loop that uses it.

    `long_poll_s` is how long nodes hold polls. A connection on which nothing moves for 30 s more
    is given up.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        long_poll_s: float,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        # Mutable state: a pool for each node, and the connections that carry a request now.
        self._clock = clock
        self._silence_s = long_poll_s + patience_s
        self._ssl_context = ssl_context
        self._connect_timeout_s = connect_timeout_s
        self._pools: dict[str, tuple[urls.BaseUrl, ConnectionPool]] = {}
        self._busy: dict[str, set[HttpConnection]] = {}

    async def send(
        self,
        node: Node,
        method: str,
        target: str,
        headers: Headers,
        body: Body = None,
    ) -> PeerReply:
        """One request; returns when the head of the reply is there.

        `target` is path and query below the node's URL; `headers` frame the body. Cancelling it
        closes the connection. Raises `NodeUnreachable`.
        """
        base, pool = self._pool(node)
        head = _head(method, f"{base.path}{target}", base.authority, headers)
        connection = await self._take(node, pool)
        busy = self._busy.setdefault(node.node_id, set())
        busy.add(connection)

        def release() -> None:
            busy.discard(connection)
            pool.give_back(connection)

        try:
            status, found, sink = await connection.stream(head, body, self._silence_s)
            if method == "HEAD":
                connection.abort()  # its reply announces a body that does not come
            elif _has_no_length(status, found):
                raise BrokenReply("the reply does not say where it ends")
        except (OSError, BrokenReply) as error:
            release()
            reason = describe(error, node.url, _WHERE)
            if isinstance(error, TimeoutError) and error.errno is None:
                reason = f"nothing was sent or received for {self._silence_s:g} s"
            raise NodeUnreachable(node, reason, received=True) from error
        except BaseException:
            connection.abort()
            release()
            raise
        return PeerReply(status, found, sink, connection, node, release)

    async def _take(self, node: Node, pool: ConnectionPool) -> HttpConnection:
        try:
            return await pool.take()
        except (OSError, BrokenReply) as error:
            reason = describe(error, node.url, _WHERE)
            raise NodeUnreachable(node, reason, received=False) from error

    def retain(self, node_ids: Collection[str]) -> None:
        """Close the connections to all other nodes; requests under way there fail at once."""
        for node_id in [known for known in self._pools if known not in node_ids]:
            self.drop(node_id)

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        self.retain(())

    def drop(self, node_id: str) -> None:
        """Close the connections to a node; requests under way there fail at once."""
        _, pool = self._pools.pop(node_id, (None, None))
        if pool is not None:
            pool.close()
        # A frozen node would keep its clients waiting for as long as silence is allowed.
        for connection in self._busy.pop(node_id, ()):
            connection.abort()

    def _pool(self, node: Node) -> tuple[urls.BaseUrl, ConnectionPool]:
        # By id and not by URL: a process that was started again is another node.
        found = self._pools.get(node.node_id)
        if found is None:
            base = urls.parse(node.url, setting="url")
            dialer = Dialer(base, self._clock, self._connect_timeout_s, self._ssl_context)
            pool = ConnectionPool(dialer, self._clock, _MAX_CONNECTIONS)
            found = self._pools[node.node_id] = base, pool
        return found


def _head(method: str, target: str, authority: str, headers: Headers) -> bytes:
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (*_bytes(method, target, authority),)]
    lines += [b"%s: %s\r\n" % header for header in headers]
    head = b"".join(lines)
    # What was parsed from a request has no line breaks; what a caller makes up must have none.
    breaks = len(lines) + 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b" " in target.encode():
        raise ValueError("a target or a header cannot be sent: it has a line break or a space")
    return head + b"\r\n"


def _bytes(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode("latin-1") for text in texts)


def _has_no_length(status: int, headers: dict[str, str]) -> bool:
    """Whether only the end of the connection would end it, as the death of the node does."""
    if status in (204, 304):
        return False
    return "content-length" not in headers and "transfer-encoding" not in headers
