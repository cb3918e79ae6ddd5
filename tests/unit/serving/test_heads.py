"""Heads of requests: how long they may be, and what they cost."""

from __future__ import annotations

import resource
import select

import pytest

from tests.patience import PATIENCE_S
from tests.unit.serving.raw_http import LOOPS, Raw, limits, running

MIB = 1 << 20
KIB = 1 << 10


def head(target: str = "/", *headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("loop", LOOPS)
def test_a_head_above_64_kib_is_refused_with_a_reason(loop: str):
    with running(loop=loop) as server, server.connect() as raw:
        raw.send(head("/", f"x-long: {'a' * 64 * KIB}"))
        reply = raw.reply()
        assert reply.status == 431
        assert "65536" in reply.json["detail"]
        assert reply.headers["connection"] == "close"
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert raw.ends()


def test_a_head_just_below_the_limit_is_served():
    with running() as server:
        rest = 64 * KIB - len(head("/", "x-long: "))
        with server.connect() as raw:
            raw.send(head("/", f"x-long: {'a' * rest}"))
            assert raw.reply().status == 200
        with server.connect() as raw:
            raw.send(head("/", f"x-long: {'a' * (rest + 1)}"))
            assert raw.reply().status == 431


def flood(raw: Raw, mib: int) -> None:
    """Send as much of one header as the server takes."""
    raw.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: ")
    block = b"a" * MIB
    try:
        for _ in range(mib):
            raw.send(block)
    except ConnectionError:
        return


def test_a_header_of_300_mib_costs_no_memory_and_is_answered():
    with running() as server:
        assert server.get().status == 200
        before = peak_mib()
        with server.connect() as raw:
            flood(raw, 300)
            assert raw.reply().status == 431
        assert server.get().status == 200
        assert peak_mib() - before < 64


def test_a_header_that_comes_in_small_pieces_is_refused_at_the_same_size():
    with running() as server, server.connect() as raw:
        raw.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        for _ in range(70):
            raw.send(b"a" * KIB)
        assert raw.reply().status == 431


def test_more_than_100_headers_are_refused():
    with running() as server:
        many = [f"x-{number}: a" for number in range(100)]
        with server.connect() as raw:
            raw.send(head("/", *many[:99]))
            assert raw.reply().status == 200
        with server.connect() as raw:
            raw.send(head("/", *many))
            reply = raw.reply()
            assert (reply.status, reply.headers["connection"]) == (431, "close")
            assert "100 headers" in reply.json["detail"]


def test_a_target_above_8_kib_is_refused():
    with running() as server:
        with server.connect() as raw:
            raw.send(head("/" + "a" * (8 * KIB - 1)))
            assert raw.reply().status == 200
        with server.connect() as raw:
            raw.send(head("/" + "a" * 8 * KIB))
            reply = raw.reply()
            assert reply.status == 414
            assert "8192" in reply.json["detail"]


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_of_one_connection_are_counted_afresh(loop: str):
    long = head("/", f"x-long: {'a' * 40 * KIB}")
    with running(loop=loop) as server, server.connect() as raw:
        for _ in range(4):
            raw.send(long)
            assert raw.reply().status == 200
        raw.send(long * 4)  # one after another without waiting
        assert [raw.reply().status for _ in range(4)] == [200] * 4


def test_a_large_body_is_no_head():
    with running() as server, server.connect() as raw:
        size = 3 * MIB
        start = f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
        raw.send(start.encode() + b"b" * size)
        assert raw.reply().json["size"] == size
        raw.send(head())
        assert raw.reply().status == 200


CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


def test_fields_after_a_chunked_body_have_a_limit_too():
    # Up to twice as much as a head: what follows the body in the same read is not counted.
    with running() as server, server.connect() as raw:
        raw.send(CHUNKED + b"1\r\na\r\n0\r\nx-late: ")
        try:
            for _ in range(200):
                raw.send(b"a" * KIB)
        except ConnectionError:
            pass
        assert raw.reply().status == 431


def test_fields_after_a_chunked_body_do_not_become_headers():
    with running() as server, server.connect() as raw:
        raw.send(CHUNKED + b"1\r\na\r\n0\r\nx-api-key: late\r\n\r\n")
        assert raw.reply().json["headers"] == ["host", "transfer-encoding"]


def test_chunks_of_one_byte_are_a_body():
    with running() as server, server.connect() as raw:
        raw.send(CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n")
        assert raw.reply().json["size"] == 50_000


def test_requests_that_wait_on_one_connection_are_limited():
    with running(limits(pipelined=4)) as server, server.connect() as raw:
        raw.send(head("/wait"))
        assert server.app.waiting.wait(PATIENCE_S)
        raw.send(head() * 200)
        server.wait_for(lambda: server.server.connections.refusals["pipelined"] == 1)
        server.on_loop(server.app.release.set)
        statuses = [raw.reply().status for _ in range(6)]
        assert statuses == [200, 200, 200, 200, 200, 429]
        assert raw.ends()


def test_what_is_not_http_is_refused_in_the_form_of_other_errors():
    with running() as server, server.connect() as raw:
        raw.send(b"\x16\x03\x01 hello\r\n\r\n")
        reply = raw.reply()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert "HTTP" in reply.json["detail"]


def test_unfinished_heads_of_all_connections_are_limited():
    with running(limits(partial_bytes=100 * KIB)) as server:
        start = b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * 40 * KIB
        raws = [server.connect() for _ in range(3)]
        for raw in raws:
            raw.send(start)
        (told,), _, _ = select.select([raw.socket for raw in raws], [], [], PATIENCE_S)
        (refused,) = [raw for raw in raws if raw.socket is told]
        assert refused.reply().status == 503
        for raw in raws:
            raw.socket.close()
        assert server.get().status == 200
        server.wait_for(lambda: server.server.connections.partial_bytes == 0)


def test_no_answer_names_the_program_behind_it():
    with running() as server:
        headers = server.get().headers
    assert "server" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
