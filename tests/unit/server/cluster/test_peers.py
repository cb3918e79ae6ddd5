"""Connections between nodes: when they are kept, closed, refused and given up."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from starlette.responses import Response

from tests.patience import PATIENCE_S
from tests.unit.server.cluster.nodes import new_peers, node_at, scripted, serving, soon
from tests.unit.serving.authority import Authority
from tinkex.server.cluster.peers import BrokenOffError, NodeUnreachable
from tinkex.serving.tls import Tls

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from tinkex.server.cluster.peers import Peers
    from tinkex.server.store.ownership import Node

pytestmark = pytest.mark.anyio


async def answer(request: Request) -> Response:
    return Response(await request.body() or b"nothing")


async def fetched(peers: Peers, node: Node, body: bytes | None = None) -> bytes:
    length = [] if body is None else [(b"content-length", b"%d" % len(body))]
    reply = await peers.send(node, "POST", "/x", length, body)
    try:
        return await asyncio.wait_for(reply.read(), PATIENCE_S)
    finally:
        reply.close()


async def test_a_request_and_its_reply():
    async with serving(answer) as node:
        peers = new_peers()
        assert await fetched(peers, node) == b"nothing"
        assert await fetched(peers, node, b"body") == b"body"
        assert await fetched(peers, node, b"x" * (3 << 20)) == b"x" * (3 << 20)
        peers.close()


async def test_tls_is_verified_unless_the_authority_is_given(tmp_path: Path):
    authority = Authority(tmp_path)
    async with serving(answer, tls=Tls(*authority.issue("one"))) as node:
        strangers = new_peers()
        with pytest.raises(NodeUnreachable, match="certificate") as caught:
            await fetched(strangers, node)
        assert not caught.value.received
        trusting = ssl.create_default_context(cafile=str(authority.certificate))
        peers = new_peers(ssl_context=trusting)
        assert await fetched(peers, node, b"x" * (3 << 20)) == b"x" * (3 << 20)
        peers.close()


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serving(answer) as node:
        peers = new_peers()
        assert await fetched(peers, node) == b"nothing"
        peers.close()


async def test_a_node_that_accepts_no_connection_is_given_up_within_the_connect_time():
    with socket.socket() as full, socket.socket() as filler, socket.socket() as more:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in (filler, more):  # the backlog is full: further SYNs are dropped
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        peers = new_peers(connect_timeout_s=0.2)
        with pytest.raises(NodeUnreachable, match="did not accept") as caught:
            await fetched(peers, node_at(f"http://127.0.0.1:{full.getsockname()[1]}"))
        assert not caught.value.received


async def test_the_connections_of_a_node_that_is_gone_are_closed():
    opened, closed = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        opened.set()
        try:
            await reader.read()
        finally:
            closed.set()

    async with scripted(script) as node:
        peers = new_peers()
        assert await fetched(peers, node) == b"ok"
        peers.retain({node.node_id})
        assert await no_change(closed)
        peers.retain({"another"})
        await soon(closed)


async def no_change(event: asyncio.Event) -> bool:
    for _ in range(20):
        await asyncio.sleep(0)
    return not event.is_set()


async def test_a_request_to_a_node_that_is_gone_fails_at_once():
    asked = asyncio.Event()

    async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    async with scripted(frozen) as node:
        peers = new_peers()
        request = asyncio.ensure_future(fetched(peers, node))
        await soon(asked)
        peers.retain(())
        with pytest.raises(NodeUnreachable):
            await asyncio.wait_for(request, PATIENCE_S)


async def test_a_reply_of_a_node_that_is_gone_breaks_off_at_once():
    async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await reader.read()

    async with scripted(frozen) as node:
        peers = new_peers()
        reply = await peers.send(node, "GET", "/x", [])
        peers.retain(())
        with pytest.raises(BrokenOffError):
            await asyncio.wait_for(reply.read(), PATIENCE_S)
        reply.close()


async def test_a_process_that_was_started_again_is_another_node():
    """Under the same URL: what is under way to the new one is not ended with the old one."""
    async with serving(answer) as node:
        peers = new_peers()
        assert await fetched(peers, node) == b"nothing"
        again = node_at(node.url, "b2")
        reply = await peers.send(again, "GET", "/x", [])
        peers.retain({again.node_id})
        assert await reply.read() == b"nothing"
        reply.close()
        peers.close()


async def test_cancelling_a_request_closes_its_connection():
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        try:
            await reader.read()
        finally:
            gone.set()

    async with scripted(script) as node:
        request = asyncio.ensure_future(fetched(new_peers(), node))
        await soon(asked)
        request.cancel()
        await soon(gone)
        with pytest.raises(asyncio.CancelledError):
            await request


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/x HTTP/1.1\r\nx-evil: 1\r\n", []),
        ("/a b", []),
        ("/x", [(b"x-a", b"1\r\nx-evil: 1")]),
        ("/x", [(b"x-a: 1\nx-evil", b"1")]),
    ],
)
async def test_no_header_can_be_smuggled_in(target: str, headers: list[tuple[bytes, bytes]]):
    async with serving(answer) as node:
        with pytest.raises(ValueError, match="line break"):
            await new_peers().send(node, "GET", target, headers)
