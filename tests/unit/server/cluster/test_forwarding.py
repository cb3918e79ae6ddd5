"""Passing requests on between real servers: headers, bodies, replies, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from tests.patience import PATIENCE_S
from tests.unit.server.cluster.nodes import (
    Client,
    client_of,
    gateway_to,
    new_hops,
    new_peers,
    node_at,
    scripted,
    serving,
    soon,
)
from tinkex.errors import APIStatusError
from tinkex.server.api.errors import error_reply
from tinkex.server.cluster.forwarding import Elsewhere, NotOwner, can_resend, misdirected
from tinkex.server.cluster.hop import HEADER
from tinkex.server.cluster.peers import NodeUnreachable
from tinkex.wire.compression import compress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from tinkex.server.store.ownership import Node

pytestmark = pytest.mark.anyio


async def echo(request: Request) -> Response:
    """Says what it was asked, as it was asked."""
    body = await request.body()
    said = {
        "method": request.method,
        "target": request.scope["raw_path"].decode(),
        "query": request.scope["query_string"].decode(),
        "headers": [
            [n.decode("latin-1"), v.decode("latin-1")] for n, v in request.scope["headers"]
        ],
        "body": body.hex() if len(body) < 1000 else len(body),
    }
    return Response(json.dumps(said), 200, {"x-from": "the owner"}, "application/json")


async def asked(client: Client, head: str, body: bytes = b"") -> dict[str, Any]:
    """What the owner got."""
    client.send(head, body)
    status, headers, reply = await asyncio.wait_for(client.reply(), PATIENCE_S)
    assert status == 200, reply
    assert headers["x-from"] == "the owner"
    return json.loads(reply)


# -- headers ------------------------------------------------------------------------------------


async def headers_of(head: str, body: bytes = b"") -> list[tuple[str, str]]:
    async with serving(echo) as owner, gateway_to(owner) as (_, gateway), client_of(gateway) as c:
        said = await asked(c, head, body)
    return [(name, value) for name, value in said["headers"]]


async def test_end_to_end_headers_are_passed_on_with_their_order_and_repetitions():
    kept = [
        ("x-api-key", "tml-secret"),
        ("authorization", "Bearer x"),
        ("accept", "application/x-protobuf"),
        ("accept-encoding", "zstd, br"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-stainless-read-timeout", "45"),
        ("x-idempotency-key", "k1"),
        ("content-type", "application/json"),
        ("content-encoding", "zstd"),
        ("x-twice", "1"),
        ("x-twice", "2"),
        ("x-latin", "caf\xe9"),
    ]
    lines = "\n".join(f"{name}: {value}" for name, value in kept[:-1])
    head = f"POST /x HTTP/1.1\nhost: here\ncontent-length: 2\n{lines}"
    async with serving(echo) as owner, gateway_to(owner) as (_, gateway), client_of(gateway) as c:
        text = head.replace("\n", "\r\n").encode() + b"\r\nx-latin: caf\xe9\r\n\r\n{}"
        c.writer.write(text)
        _, _, reply = await c.reply()
    got = [(name, value) for name, value in json.loads(reply)["headers"]]
    assert [pair for pair in got if pair in kept] == kept


@pytest.mark.parametrize(
    "line",
    [
        "connection: keep-alive",
        "keep-alive: timeout=5",
        "proxy-connection: keep-alive",
        "proxy-authorization: Basic eDp5",
        "proxy-authenticate: Basic",
        "te: trailers",
        "trailer: x-sum",
        "upgrade: h2c",
        "expect: 100-continue",
        "forwarded: for=1.2.3.4",
        "x-real-ip: 1.2.3.4",
        "x-forwarded-for: 1.2.3.4",
        "x-forwarded-proto: https",
        "x-forwarded-host: evil",
        "x-forwarded-anything: evil",
    ],
)
async def test_headers_of_one_connection_and_claims_about_the_client_are_left_out(line: str):
    got = await headers_of(f"GET /x HTTP/1.1\nhost: here\n{line}")
    assert line.partition(":")[0] not in dict(got)
    assert dict(got).keys() <= {"host", "x-request-id", HEADER}


async def test_what_connection_names_is_left_out_too():
    head = "GET /x HTTP/1.1\nhost: here\nconnection: keep-alive, X-Private\nx-private: 1\nx-kept: 2"
    got = dict(await headers_of(head))
    assert "x-private" not in got
    assert got["x-kept"] == "2"


async def test_host_length_id_and_hop_are_those_of_the_gateway():
    async with serving(echo) as owner, gateway_to(owner) as (_, gateway), client_of(gateway) as c:
        said = await asked(
            c, "POST /x HTTP/1.1\nhost: here\ncontent-length: 2\nx-request-id: bad id!", b"{}"
        )
    names = [name for name, _ in said["headers"]]
    got = dict(said["headers"])
    assert sorted(names) == ["content-length", "host", "x-request-id", HEADER]
    assert got["host"] == owner.url.removeprefix("http://")
    assert got["content-length"] == "2"
    assert len(got["x-request-id"]) == 32


async def test_the_owner_learns_the_client_s_address_and_where_it_asked():
    seen: list[Any] = []

    async def owner(request: Request) -> Response:
        hop = new_hops("b-1").admit(request.scope)
        assert request.client is not None
        seen.append((hop and hop.node_id, request.client.host, str(request.base_url)))
        return Response()

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("GET /x?y=%20 HTTP/1.1\nhost: train.example")
        assert (await c.reply())[0] == 200
    assert seen == [("a-1", "127.0.0.1", "http://train.example/")]


async def test_a_prefix_of_the_owner_s_url_is_put_before_the_path():
    async with (
        serving(echo, prefix="/below/it") as owner,
        gateway_to(owner) as (_, gateway),
        client_of(gateway) as c,
    ):
        said = await asked(c, "DELETE /api/v1/a%2Fb?x=%20&y HTTP/1.1\nhost: here")
    assert said["method"] == "DELETE"
    assert said["target"] == "/below/it/api/v1/a%2Fb"
    assert said["query"] == "x=%20&y"


async def test_status_and_headers_of_the_reply_come_back_without_those_of_the_connection():
    async def owner(request: Request) -> Response:
        headers = {
            "connection": "keep-alive, x-private",
            "x-private": "1",
            "keep-alive": "timeout=5",
            "content-encoding": "zstd",
            "retry-after": "1",
            "x-request-id": "the owner's",
        }
        return Response(b"not really compressed", 429, headers, "text/plain")

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("GET /x HTTP/1.1\nhost: here")
        status, pairs = await c.head()
        headers = dict(pairs)
        body = await c.reader.readexactly(int(headers["content-length"]))
    assert (status, body) == (429, b"not really compressed")
    assert headers["content-encoding"] == "zstd"
    assert headers["retry-after"] == "1"
    names = [name for name, _ in pairs]
    assert not {"connection", "keep-alive", "x-private", "x-request-id"} & set(names)
    assert all(names.count(name) == 1 for name in ("date", "content-type", "referrer-policy"))


# -- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{}", compress(b"x" * 10_000), b"\x00\r\n0\r\n\r\n"],
    ids=["empty", "plain", "zstd", "framing"],
)
async def test_bodies_arrive_as_they_were_sent(body: bytes, read: bool):
    head = f"POST /x HTTP/1.1\nhost: here\ncontent-length: {len(body)}"
    async with (
        serving(echo) as owner,
        gateway_to(owner, read=read) as (_, gateway),
        client_of(gateway) as c,
    ):
        for _ in range(2):
            said = await asked(c, head, body)
            assert said["body"] == body.hex()
            assert dict(said["headers"])["content-length"] == str(len(body))


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_a_chunked_body_arrives_whole(read: bool):
    head = "POST /x HTTP/1.1\nhost: here\ntransfer-encoding: chunked"
    async with (
        serving(echo) as owner,
        gateway_to(owner, read=read) as (_, gateway),
        client_of(gateway) as c,
    ):
        said = await asked(c, head, b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert bytes.fromhex(said["body"]) == b"abcde"
    framing = {name for name, _ in said["headers"]} & {"content-length", "transfer-encoding"}
    assert framing == {"content-length" if read else "transfer-encoding"}


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_a_large_body_is_passed_on_with_backpressure(read: bool):
    size = 24 << 20
    async with (
        serving(echo) as owner,
        gateway_to(owner, read=read) as (_, gateway),
        client_of(gateway) as c,
    ):
        said = await asked(c, f"PUT /x HTTP/1.1\nhost: here\ncontent-length: {size}", b"x" * size)
    assert said["body"] == size


async def test_a_get_and_a_delete_have_no_body_and_no_length():
    async with (
        serving(echo) as owner,
        gateway_to(owner, read=False) as (_, gateway),
        client_of(gateway) as c,
    ):
        for method in ("GET", "DELETE"):
            said = await asked(c, f"{method} /x HTTP/1.1\nhost: here")
            names = {name for name, _ in said["headers"]}
            assert not names & {"content-length", "transfer-encoding"}


async def test_a_head_request_is_answered_without_a_body():
    async def owner(request: Request) -> Response:
        assert request.method == "HEAD"
        return Response(b"", 200, {"content-length": "12345"})

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        for _ in range(2):
            c.send("HEAD /x HTTP/1.1\nhost: here")
            status, pairs = await c.head()
            assert (status, dict(pairs)["content-length"]) == (200, "12345")


async def test_a_reply_without_content_comes_back_as_one():
    async def owner(request: Request) -> Response:
        return Response(status_code=204)

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        for _ in range(2):
            c.send("DELETE /x HTTP/1.1\nhost: here")
            assert (await c.head())[0] == 204


async def test_a_refusal_comes_back_before_the_whole_body_was_sent():
    """An owner that refuses a large body early is heard, and the connection is not used again."""
    connections = 0

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nlarge")
        await reader.read()

    size = 64 << 20
    async with scripted(owner) as node, gateway_to(node) as (_, gateway):
        for _ in range(2):
            async with client_of(gateway) as c:
                c.send(f"PUT /x HTTP/1.1\nhost: here\ncontent-length: {size}", b"x" * size)
                status, _, body = await asyncio.wait_for(c.reply(), PATIENCE_S)
                assert (status, body) == (413, b"large")
    assert connections == 2


# -- replies that take their time -----------------------------------------------------------------


async def test_events_come_through_one_by_one():
    turn = asyncio.Event()

    async def owner(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                await turn.wait()
                turn.clear()
                yield f"data: {number}\n\n".encode()

        return StreamingResponse(events(), media_type="text/event-stream")

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        for _ in range(2):  # the second on the same connections
            c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 2", b"{}")
            status, pairs = await asyncio.wait_for(c.head(), PATIENCE_S)
            assert status == 200
            assert dict(pairs)["content-type"].startswith("text/event-stream")
            for number in range(3):
                turn.set()  # nothing more is sent before this one was read
                assert await c.chunk() == f"data: {number}\n\n".encode()
            assert await c.chunk() == b""


async def test_a_large_reply_is_not_read_ahead_of_the_client():
    size, sent = 64 << 20, 0
    piece = bytes(1 << 16)

    async def owner(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(size // len(piece)):
                sent += len(piece)
                yield piece

        return StreamingResponse(parts(), headers={"content-length": str(size)})

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("GET /x HTTP/1.1\nhost: here")
        await c.head()
        for _ in range(50):  # every task that can run has run
            await asyncio.sleep(0)
        assert sent < size // 2
        assert len(await c.reader.readexactly(size)) == size


async def test_a_long_poll_is_answered_when_there_is_something():
    polled, finished = asyncio.Event(), asyncio.Event()

    async def owner(request: Request) -> Response:
        polled.set()
        await finished.wait()
        return Response(b"done")

    async with serving(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 2", b"{}")
        await soon(polled)
        finished.set()
        assert (await c.reply())[2] == b"done"


async def test_connections_are_kept_and_used_again():
    connections = 0

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with scripted(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        for _ in range(5):
            c.send("GET /x HTTP/1.1\nhost: here")
            assert (await c.reply())[2] == b"ok"
    assert connections == 1


# -- a client that disconnects --------------------------------------------------------------------


def waiting_for(gone: asyncio.Event, asked: asyncio.Event, first: bytes) -> Any:
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        writer.write(first)
        try:
            await reader.read()
        except OSError:
            pass
        finally:
            gone.set()

    return owner


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_a_client_that_disconnects_while_it_waits_ends_the_request_to_the_owner(read: bool):
    gone, asked = asyncio.Event(), asyncio.Event()
    async with (
        scripted(waiting_for(gone, asked, b"")) as node,
        gateway_to(node, read=read) as (state, gateway),
    ):
        async with client_of(gateway) as c:
            c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 1", b"x")
            await soon(asked)
        await soon(gone)
        await soon(state.ended)
    assert [type(error) for error in state.outcomes] == [ClientDisconnect]


async def test_a_client_that_disconnects_in_mid_reply_ends_it_at_the_owner():
    gone, asked = asyncio.Event(), asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
    async with scripted(waiting_for(gone, asked, head)) as node, gateway_to(node) as (_, gateway):
        async with client_of(gateway) as c:
            c.send("GET /x HTTP/1.1\nhost: here")
            await c.head()
            assert await c.chunk() == b"x"
        await soon(gone)


async def test_a_client_that_disconnects_in_mid_body_ends_it_at_the_owner():
    gone, asked = asyncio.Event(), asyncio.Event()
    async with (
        scripted(waiting_for(gone, asked, b"")) as node,
        gateway_to(node, read=False) as (state, gateway),
    ):
        async with client_of(gateway) as c:
            c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 100", b"half")
            await soon(asked)
        await soon(gone)
        await soon(state.ended)
    assert [type(error) for error in state.outcomes] == [ClientDisconnect]


# -- nodes that fail ------------------------------------------------------------------------------


async def outcome_of(node: Any, **settings: Any) -> Exception:
    peers = new_peers(**settings)
    async with gateway_to(node, peers=peers) as (state, gateway), client_of(gateway) as c:
        c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 2", b"{}")
        assert (await asyncio.wait_for(c.reply(), PATIENCE_S))[0] == 503
    [outcome] = state.outcomes
    return outcome


def unheard(taken: socket.socket) -> Node:
    """A node where nothing listens, as long as the socket keeps its port from others."""
    taken.bind(("127.0.0.1", 0))
    return node_at(f"http://127.0.0.1:{taken.getsockname()[1]}")


async def test_a_node_that_does_not_listen_is_unreachable_and_got_nothing():
    with socket.socket() as taken:
        node = unheard(taken)
        outcome = await outcome_of(node)
    assert isinstance(outcome, NodeUnreachable)
    assert outcome.node is node
    assert not outcome.received
    assert "Nothing listens" in str(outcome)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nthe end is not announced",
    ],
    ids=["nothing", "half a head", "only 100", "not HTTP", "no length"],
)
async def test_a_node_that_dies_before_the_head_of_its_reply_is_unreachable(said: bytes):
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async with scripted(owner) as node:
        outcome = await outcome_of(node)
    assert isinstance(outcome, NodeUnreachable)
    assert outcome.received


async def test_a_small_reply_that_breaks_before_it_was_passed_on_is_none_at_all():
    """Head and half of the body in one piece, then the end: the client need not know."""

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot a chunk\r\n")

    async with scripted(owner) as node:
        assert isinstance(await outcome_of(node), NodeUnreachable)


@pytest.mark.parametrize("framing", ["content-length: 10", "transfer-encoding: chunked"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_reply_that_breaks_off_is_broken_off_for_the_client(framing: str, reset: bool):
    half_read = asyncio.Event()

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        half = b"half!" if framing.startswith("content") else b"5\r\nhalf!\r\n"
        writer.write(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode() + half)
        await half_read.wait()
        if reset:
            writer.transport.abort()

    async with scripted(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("GET /x HTTP/1.1\nhost: here")
        status, _ = await c.head()
        assert status == 200
        if framing.startswith("content"):
            assert await c.reader.readexactly(5) == b"half!"
        else:
            assert await c.chunk() == b"half!"
        half_read.set()
        rest = await asyncio.wait_for(c.reader.read(), PATIENCE_S)
    assert rest == b""  # neither the missing bytes nor a last chunk


async def test_a_node_that_never_answers_is_given_up():
    gone, asked = asyncio.Event(), asyncio.Event()
    async with scripted(waiting_for(gone, asked, b"")) as node:
        outcome = await outcome_of(node, long_poll_s=0.1, patience_s=0.1)
        await soon(gone)
    assert isinstance(outcome, NodeUnreachable)
    assert outcome.received
    assert str(outcome) == "node b: nothing was sent or received for 0.2 s"


async def test_a_node_that_falls_silent_in_mid_reply_is_given_up():
    gone, asked = asyncio.Event(), asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf!"
    peers = new_peers(long_poll_s=0.1, patience_s=0.1)
    async with (
        scripted(waiting_for(gone, asked, head)) as node,
        gateway_to(node, peers=peers) as (_, gateway),
        client_of(gateway) as c,
    ):
        c.send("GET /x HTTP/1.1\nhost: here")
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(c.reply(), PATIENCE_S)
        await soon(gone)


async def test_a_node_that_reads_nothing_of_a_large_body_is_given_up():
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.Event().wait()

    size = 64 << 20
    peers = new_peers(long_poll_s=0.1, patience_s=0.1)
    async with (
        scripted(owner) as node,
        gateway_to(node, peers=peers) as (state, gateway),
        client_of(gateway) as c,
    ):
        c.send(f"PUT /x HTTP/1.1\nhost: here\ncontent-length: {size}", b"x" * size)
        assert (await asyncio.wait_for(c.reply(), PATIENCE_S))[0] == 503
    assert isinstance(state.outcomes[0], NodeUnreachable)


async def test_a_connection_that_the_node_closed_while_it_was_idle_is_replaced():
    connections = 0
    closed = asyncio.Event()

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with scripted(owner) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        for _ in range(3):
            c.send("GET /x HTTP/1.1\nhost: here")
            assert (await c.reply())[2] == b"ok"
            await soon(closed)
            closed.clear()
    assert connections == 3


# -- one hop at most ------------------------------------------------------------------------------


async def test_a_node_that_is_not_the_owner_says_so_and_the_connection_is_kept():
    async def other(request: Request) -> Response:
        return error_reply(request, misdirected())

    async with (
        serving(other) as node,
        gateway_to(node) as (state, gateway),
        client_of(gateway) as c,
    ):
        for _ in range(2):
            c.send("GET /x HTTP/1.1\nhost: here")
            assert (await c.reply())[0] == 503
    assert [type(error) for error in state.outcomes] == [NotOwner, NotOwner]
    assert state.outcomes[0].node is node  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_request_that_was_passed_on_is_never_passed_on_again():
    reached: list[str] = []

    async def last(request: Request) -> Response:
        reached.append("c")
        return Response()

    async with (
        serving(last, name="c") as third,
        gateway_to(third, hops=new_hops("b-1")) as (second, _),
    ):
        forward = second.answer

        async def admitting(request: Request) -> Response:
            new_hops("b-1").admit(request.scope)
            return await forward(request)

        async with (
            serving(admitting) as node,
            gateway_to(node) as (first, gateway),
            client_of(gateway) as c,
        ):
            c.send("GET /x HTTP/1.1\nhost: here")
            assert (await c.reply())[0] == 503
    assert reached == []
    assert [type(error) for error in first.outcomes] == [NotOwner]
    [error] = second.outcomes
    assert isinstance(error, APIStatusError)
    assert error.status_code == 421


async def test_a_node_that_refuses_the_hop_was_not_reached_and_a_403_of_its_own_comes_through():
    async def owner(request: Request) -> Response:
        try:
            new_hops(secret=b"of another cluster").admit(request.scope)
        except APIStatusError as error:
            return error_reply(request, error)
        raise AssertionError

    async def forbids(request: Request) -> Response:
        return Response("this key may not", 403)

    async with serving(owner) as node:
        outcome = await outcome_of(node)
    assert isinstance(outcome, NodeUnreachable)
    assert not outcome.received
    async with serving(forbids) as node, gateway_to(node) as (_, gateway), client_of(gateway) as c:
        c.send("GET /x HTTP/1.1\nhost: here")
        assert (await c.reply())[0] == 403


async def test_a_hop_header_of_the_client_is_not_passed_on():
    got = await headers_of(f"GET /x HTTP/1.1\nhost: here\n{HEADER}: mine")
    values = [value for name, value in got if name == HEADER]
    assert len(values) == 1
    assert values != ["mine"]


# -- sending it once more -------------------------------------------------------------------------


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_a_request_can_be_sent_to_the_new_owner_unless_its_body_was_used_up(read: bool):
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")

    again: list[bool] = []
    async with (
        scripted(dies) as dead,
        serving(echo, name="c") as owner,
        gateway_to(dead, read=read) as (state, _),
    ):

        async def answer(request: Request) -> Response:
            await state.answer(request)
            again.append(can_resend(request))
            if not again[-1]:
                return Response(status_code=503)
            return await state.forwarder.forward(request, owner)

        async with serving(answer) as gateway, client_of(gateway) as c:
            c.send("POST /x HTTP/1.1\nhost: here\ncontent-length: 4", b"body")
            status, _, reply = await c.reply()
    assert again == [read]
    assert status == (200 if read else 503)
    if read:
        assert bytes.fromhex(json.loads(reply)["body"]) == b"body"


async def test_an_unread_body_can_be_sent_elsewhere_while_none_of_it_was():
    with socket.socket() as taken:
        await sent_elsewhere(unheard(taken))


async def sent_elsewhere(gone: Node) -> None:
    async with serving(echo, name="c") as owner, gateway_to(gone, read=False) as (state, _):

        async def answer(request: Request) -> Response:
            await state.answer(request)
            assert can_resend(request)
            return await state.forwarder.forward(request, owner)

        async with serving(answer) as gateway, client_of(gateway) as c:
            said = await asked(c, "POST /x HTTP/1.1\nhost: here\ncontent-length: 4", b"body")
    assert bytes.fromhex(said["body"]) == b"body"


def test_elsewhere_names_the_node_and_the_key():
    error = Elsewhere(node_at("http://h", "b"), "model-1")
    assert (error.node.name, error.key) == ("b", "model-1")
    assert str(error) == "model-1 is on node b"
