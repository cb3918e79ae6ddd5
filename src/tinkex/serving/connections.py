"""The open connections of a server: how many there may be, and how long each may take.

`Connections` decides who is let in and which idle connection is closed for it, and once a second it
closes connections that are too slow. The protocol of one connection is in `http_protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ipaddress import IPv4Network, IPv6Network

# What a server opens besides connections: the database, its log, the engine's socket, downloads.
_RESERVED_FILES: Final = 48
_RESERVED_PART: Final = 4
# An idle connection takes about 10 KB and one with half a head up to 64 KiB more.
_MOST_CONNECTIONS: Final = 8192
_FEWEST_CONNECTIONS: Final = 4
# Connections above the limit that are still told why they are refused, at most, and the part of
# the limit that they may be.
_REFUSED_AT_ONCE: Final = 32
_REFUSED_PART: Final = 8
_TICK_S: Final = 1.0
# In the place of an address, for connections of other nodes of the cluster.
_NODES: Final = "nodes"
_V6_SITE_BITS: Final = 64  # whoever has one IPv6 address has its whole /64

_log = logging.getLogger(__name__)

Verdict = Literal["open", "refused", "dropped"]
Reason = Literal[
    "limit",
    "address_limit",
    "partial_heads",
    "head_size",
    "pipelined",
    "slow",
    "unread",
    "malformed",
]
"""Why a connection was refused or cut off; docs/reference/metrics.md explains each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be, and how long each part of a request may take."""

    connections: int
    per_address: int
    # Addresses whose connections are those of many clients: only the limit in all applies to them.
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    head_bytes: int = 64 << 10
    headers: int = 100
    target_bytes: int = 8 << 10
    pipelined: int = 16
    # Half-sent heads of all connections together.
    partial_bytes: int = 32 << 20
    # A new connection has sent nothing; a head has begun; a body or an answer makes no progress.
    silent_s: float = 30.0
    head_s: float = 20.0
    body_stall_s: float = 30.0
    send_stall_s: float = 60.0
    # A request sent on a connection that the server is closing is lost. So clients and load
    # balancers close connections, which keep idle ones for up to a minute, and the server does not.
    idle_s: float = 75.0
    # How long a refused client may read the refusal before the connection is reset.
    linger_s: float = 2.0
    handshake_s: float = 10.0


def connection_limits(
    connections: int | None, per_address: int | None, open_files: int | None = None
) -> tuple[int, int]:
    """(connections in all, connections per address); None is what the open files allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
    possible = _MOST_CONNECTIONS
    if files != resource.RLIM_INFINITY:
        possible = files - max(_RESERVED_FILES, files // _RESERVED_PART)
    possible = max(possible, _FEWEST_CONNECTIONS)
    most = min(possible, _MOST_CONNECTIONS) if connections is None else min(connections, possible)
    if connections is not None and most < connections:
        _log.warning(
            "max_connections is %d, but this process may open %d files: %d connections are "
            "accepted; raise the limit with `ulimit -n`",
            connections,
            files,
            most,
        )
    return most, max(1, most // 2) if per_address is None else per_address


class OpenConnection(Protocol):
    """What a connection tells about itself. Its protocol object implements it."""

    site: str
    """Its address, or the network that one client can choose addresses from."""
    deadline: float
    """When `overdue` must be called, on the loop's clock."""

    def overdue(self, now: float) -> None:
        """Close it, or set another deadline."""
        ...

    def check_sending(self, now: float) -> None:
        """Abort it if the client does not read what it asked for."""
        ...

    def close_idle(self) -> None:
        """Close it in favour of another one."""
        ...


@lru_cache(maxsize=4096)
def site_of(address: str) -> str:
    """What the limit per address counts: an IPv4 address, or an IPv6 network of one site."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(ip, IPv6Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(IPv6Address(int(ip) >> _V6_SITE_BITS << _V6_SITE_BITS))


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._trusted = lru_cache(maxsize=4096)(self._is_proxy)
        # Mutable state: the connections, how many each site has, those that wait for a request
        # with the longest idle first, those whose client does not read, the refused ones, the
        # bytes of unfinished heads, how many were refused by reason, and the next sweep's timer.
        self._open: set[OpenConnection] = set()
        self._of_site: dict[str, int] = {}
        self._idle: dict[OpenConnection, None] = {}
        self._idle_of_site: dict[str, dict[OpenConnection, None]] = {}
        self._unread: set[OpenConnection] = set()
        self._refused: set[OpenConnection] = set()
        self.partial_bytes = 0
        self.refusals: Counter[Reason] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Begin to watch; needs a running loop."""
        self._timer = asyncio.get_running_loop().call_later(self._tick_s(), self._sweep)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def admit(self, address: str) -> Verdict:
        """Whether a new connection may stay; closes an idle one in its favour.

        `refused` ones may be told why, `dropped` ones are too many even for that.
        """
        site, limits = site_of(address), self.limits
        of_site = self._of_site.get(site, 0)
        if of_site >= limits.per_address and not self._trusted(address):
            # Others' connections are never closed for a site that has its share.
            own = self._close_idle(self._idle_of_site.get(site))
            return "open" if own else self._too_many("address_limit")
        if len(self._open) >= limits.connections:
            own = self._close_idle(self._idle_of_site.get(site))
            return "open" if own or self._close_idle(self._idle) else self._too_many("limit")
        return "open"

    def add(self, connection: OpenConnection, verdict: Verdict) -> None:
        """A connection was accepted; its deadline is set."""
        if verdict != "open":
            self._refused.add(connection)
            return
        self._open.add(connection)
        self._of_site[connection.site] = self._of_site.get(connection.site, 0) + 1

    def remove(self, connection: OpenConnection) -> None:
        """A connection is closed."""
        self._refused.discard(connection)
        self._unread.discard(connection)
        if connection not in self._open:
            return
        self.busy(connection)
        self._open.discard(connection)
        self._uncount(connection.site)

    def of_node(self, connection: OpenConnection) -> None:
        """Another node of the cluster has proved that a connection is its own.

        It carries the requests of many clients, so only the limit in all applies to it. By what is
        signed and not by its address: clients may share that, and a node may have several.
        """
        if connection in self._open and connection.site != _NODES:
            idle = connection in self._idle
            self.busy(connection)
            self._uncount(connection.site)
            connection.site = _NODES
            self._of_site[_NODES] = self._of_site.get(_NODES, 0) + 1
            if idle:
                self.idle(connection)

    def _uncount(self, site: str) -> None:
        left = self._of_site[site] - 1
        if left:
            self._of_site[site] = left
        else:
            del self._of_site[site]

    def idle(self, connection: OpenConnection) -> None:
        """A connection waits for a request."""
        if connection in self._open:
            self._idle[connection] = None
            self._idle_of_site.setdefault(connection.site, {})[connection] = None

    def busy(self, connection: OpenConnection) -> None:
        """A connection does not wait for a request any more."""
        if connection in self._idle:
            del self._idle[connection]
            of_site = self._idle_of_site[connection.site]
            del of_site[connection]
            if not of_site:
                del self._idle_of_site[connection.site]

    def unread(self, connection: OpenConnection) -> None:
        """A connection's client reads more slowly than the server writes."""
        self._unread.add(connection)

    def read(self, connection: OpenConnection) -> None:
        """A connection's client has read what was sent."""
        self._unread.discard(connection)

    def shed(self) -> bool:
        """Close the connection that has been idle for the longest; False without one."""
        return self._close_idle(self._idle)

    def _close_idle(self, idle: dict[OpenConnection, None] | None) -> bool:
        oldest = next(iter(idle), None) if idle else None
        if oldest is None:
            return False
        # Removed at once: its socket is closed in the next round of the loop.
        self.remove(oldest)
        oldest.close_idle()
        return True

    def _too_many(self, reason: Reason) -> Verdict:
        self.refusals[reason] += 1
        most = min(_REFUSED_AT_ONCE, max(1, self.limits.connections // _REFUSED_PART))
        return "refused" if len(self._refused) < most else "dropped"

    def _is_proxy(self, address: str) -> bool:
        return is_within(address, self.limits.proxies)

    def _tick_s(self) -> float:
        limits = self.limits
        shortest = min(limits.head_s, limits.body_stall_s, limits.send_stall_s, limits.linger_s)
        return min(_TICK_S, max(shortest / 4, 0.01))

    def _sweep(self) -> None:
        """Close what is late; a timer per connection would cost more than most requests."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for group in (self._open, self._refused):
            for connection in [one for one in group if one.deadline <= now]:
                connection.overdue(now)
        for connection in list(self._unread):
            connection.check_sending(now)
        self._timer = loop.call_later(self._tick_s(), self._sweep)


def is_within(address: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Whether an address belongs to one of the networks."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return any((mapped or ip) in network for network in networks)
