"""The header by which nodes recognise each other's requests: signing and checking it.

A hop says which node passes a request on, for which client, and to which address the client sent
it. It is signed with the cluster's secret, together with the method, the target and the time. A
node believes it, and never passes such a request on again. Bodies are not signed: whoever can
change bytes between nodes is kept out by TLS or by the network.

Times are those of the database's clock, as far as a node knows it, so that the clocks of nodes may
differ.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote

from tinkex.errors import APIStatusError, ResponseInfo, status_error
from tinkex.server.observability.requests import header_values

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

HEADER: Final = "x-tinkex-hop"
"""On a request, the signed hop. On a 403, that the hop was refused and not the client."""
MAX_AGE_S: Final = 60.0
OF_NODE: Final = "tinkex.of_node"
"""In a scope, what the server wants called when a request comes from another node."""
_HEADER: Final = HEADER.encode()
_VERSION: Final = "1"
_NOTE: Final = "tinkex.hop"
# Percent-encoded otherwise: a field has neither spaces nor line breaks. Colons are in addresses.
_PLAIN: Final = ":/[]"


@dataclass(frozen=True, slots=True)
class Hop:
    """What a checked hop says."""

    node_id: str
    """The node that passes the request on."""
    client: str = ""
    """The client's address as that node saw it."""
    origin: str = ""
    """Scheme and host that the client sent the request to, for links in the reply."""


def sign(secret: bytes, method: str, target: str, hop: Hop, now: float) -> str:
    """The header's value for one request; `target` is path and query below the node's URL."""
    said = f"{_VERSION} {now:.3f} {_field(hop.node_id)} {_field(hop.client)} {_field(hop.origin)}"
    return f"{said} {_signature(secret, method, target, said)}"


def check(secret: bytes, method: str, target: str, value: str, now: float) -> Hop:
    """What a hop says; raises a 403 that names what is wrong with it."""
    said, _, signature = value.rpartition(" ")
    fields = said.split(" ")
    if len(fields) != 5 or not value.isascii():
        raise _refused("it is malformed")
    version, at, node_id, client, origin = fields
    if version != _VERSION:
        raise _refused("it has another version")
    expected = _signature(secret, method, target, said)
    if not hmac.compare_digest(expected, signature):
        raise _refused("its signature is wrong")
    age_s = now - _seconds(at)
    if not abs(age_s) <= MAX_AGE_S:
        when = f"{age_s:.0f} s old" if age_s > 0 else f"{-age_s:.0f} s in the future"
        raise _refused(f"it is {when}, {MAX_AGE_S:.0f} s are allowed; compare the nodes' clocks")
    return Hop(_text(node_id), _text(client), _text(origin))


def target_of(scope: MutableMapping[str, Any]) -> str:
    """Path and query of a request below the prefix that its app is mounted at."""
    raw = cast("bytes | None", scope.get("raw_path"))
    path = quote(cast("str", scope["path"])) if raw is None else raw.decode("latin-1")
    root = quote(str(scope.get("root_path", "")).rstrip("/"))
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    query = cast("bytes", scope["query_string"])
    return f"{path}?{query.decode('latin-1')}" if query else path


def received_hop(scope: MutableMapping[str, Any]) -> Hop | None:
    """The hop of a request that `Hops.admit` has checked; None for one of a client."""
    return cast("Hop | None", scope.get(_NOTE))


@dataclass(frozen=True, slots=True)
class Hops:
    """Signs and checks for one node; `now` is the database's time as far as the node knows it."""

    secret: bytes = field(repr=False)
    node_id: str
    now: Callable[[], float]

    def sign(self, method: str, target: str, client: str = "", origin: str = "") -> str:
        """The header's value for a request to another node."""
        return sign(self.secret, method, target, Hop(self.node_id, client, origin), self.now())

    def admit(self, scope: MutableMapping[str, Any]) -> Hop | None:
        """Check the hop of a request, if it has one; raises a 403.

        Everything that reads the scope afterwards sees the client instead of the node that passed
        its request on: its address, and the scheme and the host that it sent the request to.
        """
        value = header_values(scope).get(_HEADER)
        if value is None:
            return None
        hop = check(
            self.secret, scope["method"], target_of(scope), value.decode("latin-1"), self.now()
        )
        scope[_NOTE] = hop
        of_node = cast("Callable[[], None] | None", scope.get(OF_NODE))
        if of_node is not None:
            of_node()
        scope["client"] = (hop.client, 0) if hop.client else None
        scheme, separator, host = hop.origin.partition("://")
        if separator:
            scope["scheme"] = scheme
            scope["headers"] = [
                (b"host", host.encode("latin-1")),
                *((name, value) for name, value in scope["headers"] if name != b"host"),
            ]
            header_values(scope)[b"host"] = host.encode("latin-1")
        return hop


def refused_hop(status: int, headers: MutableMapping[str, str]) -> bool:
    """Whether a node's reply refuses the hop, and not what the client asked for."""
    return status == 403 and HEADER in headers


def _signature(secret: bytes, method: str, target: str, said: str) -> str:
    text = f"{method}\n{target}\n{said}"
    return hmac.new(secret, text.encode("latin-1"), hashlib.sha256).hexdigest()


def _field(text: str) -> str:
    return quote(text, safe=_PLAIN) or "-"


def _text(quoted: str) -> str:
    return "" if quoted == "-" else unquote(quoted)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refused("it is malformed") from None


def _refused(reason: str) -> APIStatusError:
    detail = f"The header {HEADER} is for requests between nodes of this cluster: {reason}."
    return status_error(ResponseInfo(403, {HEADER: "refused"}), {"detail": detail})
