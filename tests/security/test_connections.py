"""Connections that cost much, say nothing, or lie about where they come from."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import served
from tests.patience import PATIENCE_S
from tests.security.world import MOST_BYTES, world_on
from tinkex.serving.process import raise_file_limit

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from tests.security.world import World

MIB = 1 << 20
START = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server that waits for seconds where others wait for minutes."""
    flags = ("head_timeout_s=2", "body_stall_s=2", "send_stall_s=2")
    given = [word for flag in flags for word in ("--set", flag)]
    with world_on(tmp_path_factory.mktemp("hasty"), *given) as made:
        yield made


def said(connection: socket.socket) -> bytes:
    """All that a server sends before it closes the connection."""
    found = b""
    try:
        while more := connection.recv(1 << 16):
            found += more
    except ConnectionError:
        pass
    return found


def test_a_header_of_300_mib_without_a_key_costs_nothing(hasty: World):
    with hasty.watching() as seen, hasty.connect() as raw:
        raw.sendall(START + b"x-long: ")
        block = b"a" * MIB
        try:
            for _ in range(300):
                raw.sendall(block)
        except ConnectionError:
            pass  # it need not take them all
        assert b"HTTP/1.1 431 " in said(raw)
    assert seen.peak_bytes < MOST_BYTES
    assert hasty.metric("tinkex_connections_refused_total", reason="head_size") == 1
    assert hasty.metric("tinkex_connections_open") >= 1
    hasty.assert_well()


def test_fifteen_hundred_half_sent_heads_are_closed(hasty: World):
    raise_file_limit()  # many systems allow 1024 to begin with
    raws: list[socket.socket] = []
    try:
        with hasty.watching() as seen:
            for _ in range(1500):
                raw = hasty.connect()
                raw.sendall(START + b"x-long: " + b"a" * 4096)
                raws.append(raw)
            assert {said(raw).split(b" ", 2)[1] for raw in raws} <= {b"408", b"503"}
        assert seen.peak_bytes < MOST_BYTES
        hasty.assert_well()
    finally:
        for raw in raws:
            raw.close()


def test_a_body_that_stalls_is_ended(hasty: World):
    with hasty.connect() as raw:
        head = f"POST /api/v1/create_session HTTP/1.1\r\nx-api-key: {hasty.attacker.key}\r\n"
        raw.sendall(f"{head}host: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        assert b"HTTP/1.1 408 " in said(raw)
    hasty.assert_well()


def test_many_requests_at_once_on_one_connection_take_little_memory(hasty: World):
    request = START + b"\r\n"
    with hasty.watching() as seen, hasty.connect() as raw:
        try:
            for _ in range(200):
                raw.sendall(request * 1000)
        except ConnectionError:
            pass
        assert b"HTTP/1.1 200 " in said(raw)
    assert seen.peak_bytes < MOST_BYTES
    hasty.assert_well()


@pytest.mark.parametrize("sent", [b"", START + b"x: "], ids=["silent", "half-sent"])
def test_with_few_open_files_one_address_does_not_shut_others_out(tmp_path: Path, sent: bytes):
    with world_on(tmp_path, open_files=64) as world:
        raws = [world.connect("127.0.0.2") for _ in range(100)]
        try:
            for raw in raws:
                try:
                    raw.sendall(sent)
                except ConnectionError:
                    continue  # refused
            world.assert_well()
        finally:
            for raw in raws:
                raw.close()


def test_a_forwarded_address_does_not_hide_who_tries_bad_keys(world: World):
    statuses: list[int] = []
    for number in range(400):
        headers = {"x-api-key": f"tml-bad-{number}", "x-forwarded-for": f"192.0.2.{number % 250}"}
        answer = world.attacker.request("GET", "get_server_capabilities", headers=headers)
        statuses.append(answer.status)
    assert set(statuses) == {401, 429}
    world.assert_well()


def test_forwarded_addresses_of_a_named_proxy_are_throttled_one_by_one(tmp_path: Path):
    with world_on(tmp_path, "--set", "trusted_proxies=127.0.0.1") as world:
        statuses = {
            world.attacker.request(
                "GET",
                "get_server_capabilities",
                headers={"x-api-key": "tml-bad", "x-forwarded-for": f"198.51.{number}.7"},
            ).status
            for number in range(200)
        }
        assert statuses == {401}
        world.assert_well()


def test_a_server_without_keys_does_not_answer_to_other_names(tmp_path: Path):
    def ask(name: str, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", int(server.port), timeout=PATIENCE_S)
        path = "/api/v1/get_server_capabilities"
        connection.request("GET", path, headers={"host": name, "x-api-key": "tml-any", **headers})
        status = connection.getresponse().status
        connection.close()
        return status

    with served(tmp_path / "data", "--set", "allowed_hosts=box.example.com") as server:
        names = ["127.0.0.1:1", "localhost", "[::1]:8000", "box.example.com:80"]
        assert [ask(name) for name in names] == [200] * 4
        assert ask("rebound.example") == 421
        assert ask("localhost", origin="https://page.example") == 403


def test_answers_have_the_headers_that_browsers_need(hasty: World):
    answer = hasty.attacker.get("get_server_capabilities")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not {"server", "access-control-allow-origin"} & answer.headers.keys()
