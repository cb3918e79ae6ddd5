"""Bytes that are no HTTP, or nearly: answered by 4xx or closed, and the server goes on."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.security.world import MOST_BYTES

if TYPE_CHECKING:
    from tests.security.world import World

_KEY = b"@KEY@"
_POST = b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: @KEY@\r\n"
_BODY = b'{"tags":[],"user_metadata":{},"sdk_version":"x"}'

REQUESTS: dict[str, bytes] = {
    "nothing": b"",
    "newlines": b"\r\n" * 1000,
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 50,
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "version": b"GET /healthz HTTP/9.9\r\nhost: x\r\n\r\n",
    "method": b"G\x00T /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "long method": b"G" * 100_000 + b" / HTTP/1.1\r\n\r\n",
    "nul in target": b"GET /api/v1/sessions/\x00 HTTP/1.1\r\nhost: x\r\nx-api-key: @KEY@\r\n\r\n",
    "absolute target": b"GET http://other.invalid/healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "connect": b"CONNECT other.invalid:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "dots in target": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "escaped dots": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "bad escape": b"GET /api/v1/sessions/%zz%f HTTP/1.1\r\nhost: x\r\nx-api-key: @KEY@\r\n\r\n",
    "not UTF-8": b"GET /api/v1/sessions/%ff%fe HTTP/1.1\r\nhost: x\r\nx-api-key: @KEY@\r\n\r\n",
    "no host": b"GET /api/v1/sessions HTTP/1.1\r\nx-api-key: @KEY@\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "header without colon": b"GET /healthz HTTP/1.1\r\nhost: x\r\nnonsense\r\n\r\n",
    "space before colon": b"GET /healthz HTTP/1.1\r\nhost : x\r\n\r\n",
    "folded header": b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n",
    "nul in header": b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: \x00\r\n\r\n",
    "bare newline": b"GET /healthz HTTP/1.1\nhost: x\n\n",
    "two keys": b"GET /api/v1/sessions HTTP/1.1\r\nhost: x\r\nx-api-key: a\r\nx-api-key: b\r\n\r\n",
    "negative length": _POST + b"content-length: -1\r\n\r\n" + _BODY,
    "length of letters": _POST + b"content-length: abc\r\n\r\n" + _BODY,
    "length of digits": _POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
    "two lengths": _POST + b"content-length: 1\r\ncontent-length: 48\r\n\r\n" + _BODY,
    "length and chunks": _POST
    + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + b"GET /api/v1/auth/apikey/me HTTP/1.1\r\n",
    "unknown encoding": _POST + b"transfer-encoding: gzip\r\n\r\n" + _BODY,
    "chunk size": _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "negative chunk": _POST + b"transfer-encoding: chunked\r\n\r\n-1\r\nx\r\n",
    "huge chunk": _POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\nx",
    "chunk extension": _POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 1_000_000,
    "endless chunk size": _POST + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 1_000_000,
    "trailers": _POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000,
    "upgrade": b"GET /healthz HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n\r\n",
    "expect": _POST + b"expect: 200-maybe\r\ncontent-length: 48\r\n\r\n" + _BODY,
    "encoding of zeros": _POST
    + b"content-encoding: zstd\r\ncontent-length: 48\r\n\r\n"
    + b"\0" * 48,
    "many encodings": _POST
    + b"content-encoding: zstd, zstd, zstd\r\ncontent-length: 48\r\n\r\n"
    + _BODY,
}


def exchanged(world: World, request: bytes) -> bytes:
    """The first bytes that come back before the server closes or waits for more."""
    with world.connect() as connection:
        connection.sendall(request.replace(_KEY, world.attacker.key.encode()))
        connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while len(found) < 1000 and (piece := connection.recv(1000)):
                found += piece
        except ConnectionError:
            pass
        return found


@pytest.mark.parametrize("name", REQUESTS)
def test_malformed_requests_are_refused_and_hurt_nobody(world: World, name: str) -> None:
    with world.watching() as seen:
        answer = exchanged(world, REQUESTS[name])
    status = answer[9:12]
    assert status in (b"", b"200") or status.startswith(b"4") or status == b"501", answer[:200]
    assert world.neighbour.key.encode() not in answer
    assert seen.peak_bytes < MOST_BYTES
    assert world.neighbour.get("/healthz").status == 200


def test_a_second_request_hidden_in_a_body_is_not_answered(world: World) -> None:
    """Lengths that contradict each other must end the connection, not begin another request."""
    hidden = b"GET /api/v1/auth/apikey/me HTTP/1.1\r\nhost: x\r\nx-api-key: @KEY@\r\n\r\n"
    for head in (
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: identity, chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(hidden),
    ):
        answer = exchanged(world, _POST + head + hidden)
        assert b'"key' not in answer, answer
        assert answer.count(b"HTTP/1.1 ") <= 1, answer
    world.assert_well()


def test_the_server_is_well_after_all_of_them(world: World) -> None:
    for request in REQUESTS.values():
        exchanged(world, request)
    world.assert_well()
