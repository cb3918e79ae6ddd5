"""Passing a request on to the node that owns what it is about, and its reply back.

The request is sent as it was received, the body still compressed, and the reply is not decoded
either. Only headers that belong to one connection are replaced. A request is passed on once: one
that came from another node is answered here, or refused with 421.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tinkex.errors import InputError, ResponseInfo, status_error
from tinkex.server.cluster.hop import HEADER, received_hop, refused_hop, target_of
from tinkex.server.cluster.peers import BrokenOffError, NodeUnreachable
from tinkex.server.observability.requests import header_value, request_record, sent_body
from tinkex.server.supervision import while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from tinkex.errors import APIStatusError
    from tinkex.server.cluster.hop import Hops
    from tinkex.server.cluster.peers import Body, PeerReply, Peers
    from tinkex.server.store.ownership import Node

    Header = tuple[bytes, bytes]

MISDIRECTED: Final = 421

# RFC 9110, 7.6.1; and what `Connection` names.
_ONE_CONNECTION: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Written anew; `Expect` was answered by this server. What a client says about its own address is
# not believed by this node, and must not be believed by the next one.
_REQUEST_OWN: Final = frozenset(
    {b"host", b"content-length", b"expect", b"forwarded", b"x-real-ip", b"x-request-id"}
) | {HEADER.encode()}
_FORWARDED: Final = b"x-forwarded-"
# The server of every node adds these to every reply; a client gets those of the node it talks to.
_REPLY_OWN: Final = frozenset(
    {
        b"date",
        b"referrer-policy",
        b"strict-transport-security",
        b"x-content-type-options",
        b"x-request-id",
    }
)


class Elsewhere(Exception):
    """Another node owns what a request is about, and has to answer it."""

    def __init__(self, node: Node, key: str, others: Sequence[Node] | None = None) -> None:
        super().__init__(f"{key} is on node {node.name}")
        self.node = node
        self.key = key
        self.others = others
        """Nodes that could answer as well; None if only the owner of the key can."""


class NotOwner(Exception):
    """The node that a request was passed on to does not own the key any more."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"node {node.name} does not own it")
        self.node = node


def misdirected() -> APIStatusError:
    """The refusal of a request that another node passed on, and that is not for this one."""
    detail = "This node does not own what the request is about; look up which one does."
    return status_error(ResponseInfo(MISDIRECTED), {"detail": detail})


def can_resend(request: Request) -> bool:
    """Whether a request can be passed on once more: its body was kept, or was not begun."""
    return sent_body(request.scope) is not None or not request._stream_consumed  # pyright: ignore[reportPrivateUsage] - Starlette has no other way to ask


class Forwarder:
    """Passes requests on; has no state but the connections."""

    def __init__(self, peers: Peers, hops: Hops) -> None:
        self._peers = peers
        self._hops = hops

    async def ask(
        self, node: Node, method: str, target: str, body: bytes = b"", media: str = ""
    ) -> bytes:
        """What another node answers to a question of this one.

        Raises `NodeUnreachable`, `BrokenOffError`, and `InputError` for any status but 200.
        """
        headers = [
            (b"content-length", str(len(body)).encode()),
            (HEADER.encode(), self._hops.sign(method, target).encode()),
        ]
        if media:
            headers.append((b"content-type", media.encode()))
        reply = await self._peers.send(node, method, target, headers, body)
        try:
            answer = await reply.read()
        finally:
            reply.close()
        if reply.status != 200:
            raise InputError(f"it answered {reply.status}: {answer[:200]!r}")
        return answer

    async def forward(self, request: Request, node: Node) -> Response:
        """The reply of another node, on its way to the client.

        Raises `NodeUnreachable` when the node gave no reply and `NotOwner` when it does not own
        the key; then the owner is to be looked up, and the request may be forwarded again if
        `can_resend`. Raises `ClientDisconnect`, and a 421 for a request that was passed on before.
        """
        scope = request.scope
        if received_hop(scope) is not None:
            raise misdirected()
        method, target = request.method, target_of(scope)
        uploaded = anyio.Event()
        body, framing = _body(request, uploaded)
        headers = [
            *end_to_end(scope["headers"], _REQUEST_OWN),
            *framing,
            (b"x-request-id", request_record(scope).request_id.encode()),
            (HEADER.encode(), self._hop(request, target).encode()),
        ]
        reply: PeerReply | None = None

        async def receive() -> Message:
            await uploaded.wait()  # until then, messages of the client are parts of the body
            return await request.receive()

        async def send() -> None:
            nonlocal reply
            reply = await self._peers.send(node, method, target, headers, body)

        try:
            await while_connected(receive, send)
            if reply is None:
                raise ClientDisconnect
            return await _response(cast("PeerReply", reply), node, method)
        except BaseException:
            if reply is not None:
                cast("PeerReply", reply).close()
            raise

    def _hop(self, request: Request, target: str) -> str:
        host = header_value(request.scope, "host")
        origin = f"{request.scope.get('scheme', 'http')}://{host}" if host else ""
        address = "" if request.client is None else request.client.host
        return self._hops.sign(request.method, target, address, origin)


def end_to_end(headers: Iterable[Header], own: frozenset[bytes]) -> Iterator[Header]:
    """The headers that are passed on: not those of one connection, nor those in `own`."""
    listed = list(headers)
    named = {
        word.strip().lower()
        for name, value in listed
        if name == b"connection"
        for word in value.split(b",")
    }
    left_out = _ONE_CONNECTION | own | named if named else _ONE_CONNECTION | own
    return (
        (name, value)
        for name, value in listed
        if name not in left_out and not name.startswith(_FORWARDED)
    )


def _body(request: Request, uploaded: anyio.Event) -> tuple[Body, list[Header]]:
    """What is sent as the body, and the headers that say how long it is."""
    sent = sent_body(request.scope)
    length = header_value(request.scope, "content-length")
    chunked = bool(header_value(request.scope, "transfer-encoding"))
    if not sent and not chunked and length in ("", "0"):
        sent = b"" if length else None  # a request without a body stays one
    elif sent is None:
        framing = (b"transfer-encoding", b"chunked")
        if not chunked:
            framing = (b"content-length", length.encode())
        return _rest(request, uploaded, chunked=chunked), [framing]
    uploaded.set()
    return sent, [] if sent is None else [(b"content-length", b"%d" % len(sent))]


async def _rest(request: Request, uploaded: anyio.Event, *, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it arrives, framed."""
    async for part in request.stream():
        if part:
            yield b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
    if chunked:
        yield b"0\r\n\r\n"
    uploaded.set()


async def _response(reply: PeerReply, node: Node, method: str) -> Response:
    if reply.status == MISDIRECTED:
        raise NotOwner(node)
    if refused_hop(reply.status, reply.headers):
        raise NodeUnreachable(node, "it refused the hop; do the clocks differ?", received=False)
    if method == "HEAD":
        reply.close()
        return _Whole(reply, b"")
    if not reply.complete:
        return _Streamed(reply)
    try:
        whole = await reply.read()
    except BrokenOffError as error:  # nothing was sent to the client yet
        raise NodeUnreachable(node, str(error), received=True) from error
    reply.close()
    return _Whole(reply, whole)


class _Whole(Response):
    """A reply that has arrived."""

    def __init__(self, reply: PeerReply, body: bytes) -> None:
        self.status_code = reply.status
        self.raw_headers = _reply_headers(reply.headers)
        self.body = body
        self.background = None


class _Streamed(_Whole):
    """A reply that is still arriving. A client that disconnects ends it."""

    def __init__(self, reply: PeerReply) -> None:
        super().__init__(reply, b"")
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def copy() -> None:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            # A reply that breaks off raises, and the server closes the connection in the middle:
            # a client never takes the first half for the whole.
            async for chunk in self._reply.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await while_connected(receive, copy)
        finally:
            self._reply.close()


def _reply_headers(headers: Mapping[str, str]) -> list[Header]:
    own = _REPLY_OWN
    if "transfer-encoding" in headers:
        own |= {b"content-length"}  # it would be wrong
    encoded = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
    return list(end_to_end(encoded, own))
