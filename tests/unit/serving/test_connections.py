"""Connections that are slow, silent or too many."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.serving.raw_http import LOOPS, Raw, Running, limits, running
from tinkex.serving.connections import connection_limits, site_of

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


def opened(server: Running) -> int:
    return server.on_loop(lambda: len(server.server.connections))


def wait_for_heads(server: Running, *begun: bytes) -> None:
    """Until so much of the heads of requests has arrived."""
    size = sum(map(len, begun))
    server.wait_for(lambda: server.server.connections.partial_bytes == size)


def answered(raw: Raw) -> int:
    raw.send(HEAD)
    return raw.reply().status


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_says_nothing_is_closed(loop: str):
    with running(limits(silent_s=0.2), loop=loop) as server, server.connect() as raw:
        assert raw.ends()
        server.wait_for(lambda: len(server.server.connections) == 0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_head_that_is_not_finished_in_time_is_answered_and_closed(loop: str):
    with running(limits(head_s=0.3), loop=loop) as server, server.connect() as raw:
        raw.send(b"GET / HTTP/1.1\r\nhost: local")
        reply = raw.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert "0.3 s" in reply.json["detail"]
        assert raw.ends()


def test_a_head_that_trickles_gets_no_more_time():
    with running(limits(head_s=0.5)) as server, server.connect() as raw:
        raw.socket.settimeout(0.05)
        raw.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
        for _ in range(round(PATIENCE_S / 0.05)):
            raw.send(b"a")
            try:
                assert raw.reply().status == 408
                return
            except TimeoutError:
                continue
        raise AssertionError("the head was never refused")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_that_stalls_is_answered_and_closed(loop: str):
    with running(limits(body_stall_s=0.3), loop=loop) as server, server.connect() as raw:
        raw.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
        reply = raw.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert server.app.disconnected.wait(PATIENCE_S)
        assert raw.ends()


def test_a_body_whose_rest_never_comes_after_its_answer_is_closed():
    with running(limits(body_stall_s=0.3)) as server, server.connect() as raw:
        raw.send(b"POST /unread HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
        assert raw.reply().status == 200
        assert raw.ends()


def test_a_client_that_waits_to_be_asked_for_the_body_is_not_slow():
    with running(limits(body_stall_s=0.1)) as server, server.connect() as raw:
        expect = "host: localhost\r\ncontent-length: 3\r\nexpect: 100-continue"
        raw.send(f"POST /wait HTTP/1.1\r\n{expect}\r\n\r\n".encode())
        assert server.app.waiting.wait(PATIENCE_S)
        passed = server.on_loop(lambda: server.loop.time())  # type: ignore[union-attr]
        server.wait_for(lambda: server.loop.time() > passed + 0.5)  # type: ignore[union-attr]
        server.on_loop(server.app.release.set)
        assert raw.socket.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        raw.send(b"abc")
        assert raw.reply().json["size"] == 3


def test_a_slow_answer_has_all_the_time_it_needs():
    most = limits(silent_s=0.1, head_s=0.1, body_stall_s=0.1, send_stall_s=0.1, idle_s=0.1)
    with running(most) as server, server.connect() as raw:
        raw.send(HEAD.replace(b"/ ", b"/wait ", 1))
        assert server.app.waiting.wait(PATIENCE_S)
        passed = server.on_loop(lambda: server.loop.time())  # type: ignore[union-attr]
        server.wait_for(lambda: server.loop.time() > passed + 0.5)  # type: ignore[union-attr]
        server.on_loop(server.app.release.set)
        assert raw.reply().status == 200


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_does_not_read_its_answer_is_cut_off(loop: str):
    with running(limits(send_stall_s=0.3), loop=loop) as server, server.connect() as raw:
        raw.send(HEAD.replace(b"/ ", b"/large ", 1))
        server.wait_for(lambda: server.server.connections.refusals["unread"] == 1)
        server.wait_for(lambda: len(server.server.connections) == 0)
        with pytest.raises((EOFError, ConnectionError)):
            raw.reply()


def test_a_client_that_reads_slowly_gets_all_of_its_answer():
    with running(limits(send_stall_s=PATIENCE_S)) as server, server.connect() as raw:
        server.app.large = 16 << 20
        raw.send(HEAD.replace(b"/ ", b"/large ", 1))
        size = 0
        while size < 16 << 20:
            size += len(raw.socket.recv(1 << 18))
            assert server.on_loop(lambda: True)
        assert size > 16 << 20


@pytest.mark.parametrize("loop", LOOPS)
def test_above_the_limit_the_longest_idle_connection_of_the_address_is_closed(loop: str):
    with running(limits(per_address=2), loop=loop) as server:
        first, second = server.connect(), server.connect()
        assert (answered(first), answered(second), answered(first)) == (200, 200, 200)
        with server.connect() as third:
            assert answered(third) == 200
            assert second.ends()  # idle for longer than the first
            assert answered(first) == 200


@pytest.mark.parametrize("loop", LOOPS)
def test_without_an_idle_connection_the_new_one_is_refused(loop: str):
    with running(limits(per_address=2), loop=loop) as server:
        busy = [server.connect() for _ in range(2)]
        for raw in busy:
            raw.send(b"GET / HT")
        wait_for_heads(server, b"GET / HT", b"GET / HT")
        with server.connect() as raw:
            reply = raw.reply()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert reply.headers["retry-after"] == "1"
            assert "2 of them from one address" in reply.json["detail"]
            assert raw.ends()
        assert server.get(source="127.0.0.2").status == 200


def test_one_address_does_not_shut_others_out():
    with running(limits(connections=8, per_address=4)) as server:
        for _ in range(20):
            server.connect()  # and says nothing
        assert server.get(source="127.0.0.2").status == 200
        assert opened(server) <= 8


def test_a_full_server_closes_the_longest_idle_connection_of_others():
    with running(limits(connections=2, per_address=2)) as server:
        idle = [server.connect(source="127.0.0.3") for _ in range(2)]
        assert [answered(raw) for raw in idle] == [200, 200]
        assert server.get(source="127.0.0.2").status == 200
        assert idle[0].ends()


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_of_other_nodes_do_not_count_for_their_address(loop: str):
    of_node = HEAD.replace(b"/ ", b"/node ", 1)
    with running(limits(per_address=2), loop=loop) as server:
        nodes = [server.connect() for _ in range(2)]
        for _ in range(4):
            for raw in nodes:  # once known, again and again
                raw.send(of_node)
                assert raw.reply().status == 200
            nodes.append(server.connect())
        clients = [nodes.pop(), server.connect()]
        assert [answered(raw) for raw in clients] == [200, 200]
        for raw in clients:
            raw.send(b"GET / HT")
        wait_for_heads(server, b"GET / HT", b"GET / HT")
        assert server.get().status == 503  # clients at the same address have their limit
        for raw in nodes:
            raw.send(of_node)
            assert raw.reply().status == 200
        for raw in (*nodes, *clients):
            raw.socket.close()
        server.wait_for(lambda: len(server.server.connections) == 0)


def test_a_trusted_proxy_has_no_limit_of_its_own():
    from ipaddress import ip_network

    proxy = (ip_network("127.0.0.1"),)
    with running(limits(per_address=2, proxies=proxy)) as server:
        raws = [server.connect() for _ in range(6)]
        assert [answered(raw) for raw in raws] == [200] * 6
        assert [answered(raw) for raw in raws] == [200] * 6


def test_refusals_do_not_pile_up_either():
    with running(limits(connections=1, per_address=1, linger_s=30.0)) as server:
        busy = server.connect()
        busy.send(b"GET")
        wait_for_heads(server, b"GET")
        refused = [server.connect() for _ in range(60)]
        assert refused[0].reply().status == 503
        assert refused[-1].ends()  # not even told


def test_refused_connections_are_counted_by_reason():
    most = limits(
        connections=4, per_address=2, head_s=0.3, body_stall_s=0.3, send_stall_s=0.3, headers=3
    )
    with running(most) as server:
        refusals = server.server.connections.refusals
        with server.connect() as raw:
            raw.send(HEAD.replace(b"\r\n\r\n", b"\r\na: b" * 4 + b"\r\n\r\n"))
            assert raw.reply().status == 431
        assert dict(refusals) == {"head_size": 1}
        with server.connect() as raw:
            raw.send(b"GET / HT")
            assert raw.reply().status == 408
        with server.connect() as raw:
            raw.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc")
            assert raw.reply().status == 408
        with server.connect() as raw:
            raw.send(b"nonsense\r\n\r\n")
            assert raw.reply().status == 400
        assert dict(refusals) == {"head_size": 1, "slow": 2, "malformed": 1}
        with server.connect() as raw:
            raw.send(HEAD.replace(b"/ ", b"/large ", 1))
            server.wait_for(lambda: refusals["unread"] == 1)


def test_too_many_connections_are_counted_apart_for_one_address_and_for_all():
    with running(limits(connections=3, per_address=2)) as server:
        refusals = server.server.connections.refusals
        for source in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
            server.connect(source).send(b"GET")
        wait_for_heads(server, b"GET", b"GET", b"GET")
        for source in ("127.0.0.1", "127.0.0.3"):
            with server.connect(source) as raw:
                assert raw.ends()  # told why, or dropped
        assert dict(refusals) == {"address_limit": 1, "limit": 1}


def test_connections_that_are_over_are_forgotten():
    with running() as server:
        for _ in range(5):
            assert server.get().status == 200
        server.wait_for(lambda: len(server.server.connections) == 0)
        state = server.on_loop(lambda: dict(vars(server.server.connections)))
        for name in ("_of_site", "_idle", "_idle_of_site", "_unread", "_refused"):
            assert not state[name], name


@pytest.mark.parametrize(
    ("files", "asked", "expected"),
    [
        (64, (None, None), (16, 8)),
        (1024, (None, None), (768, 384)),
        (65_536, (None, None), (8192, 4096)),
        (resource.RLIM_INFINITY, (None, None), (8192, 4096)),
        (65_536, (20_000, None), (20_000, 10_000)),
        (1024, (20_000, 5), (768, 5)),
        (8, (None, None), (4, 2)),
    ],
)
def test_limits_follow_from_the_number_of_open_files(
    files: int, asked: Sequence[Any], expected: tuple[int, int]
):
    assert connection_limits(*asked, open_files=files) == expected


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("somewhere", "somewhere"),
    ],
)
def test_one_site_is_one_address_or_one_ipv6_network(address: str, site: str):
    assert site_of(address) == site
