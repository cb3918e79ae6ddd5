"""How answers travel: few packets, and on connections that nobody closes under a client."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import Any, cast

import pytest
from starlette.applications import Starlette

from tinkex.clock import SystemClock
from tinkex.serving.resources import raise_file_limit, settle
from tinkex.serving.web import Joined, Web
from tinkex.transport import pool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Transport:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined() -> tuple[Joined, Transport]:
    transport = Transport()
    return Joined(cast("asyncio.Transport", transport)), transport


async def test_head_and_body_travel_together() -> None:
    answer, transport = joined()
    for _ in range(2):
        answer.write(b"head ")
        answer.write(b"body")
    assert transport.sent == [b"head body"] * 2
    await asyncio.sleep(0)
    assert transport.sent == [b"head body"] * 2


async def test_what_comes_alone_is_sent_at_the_end_of_the_turn() -> None:
    answer, transport = joined()
    answer.write(b"event")
    assert transport.sent == []
    await asyncio.sleep(0)
    assert transport.sent == [b"event"]


async def test_an_empty_body_sends_the_head() -> None:
    answer, transport = joined()
    answer.write(b"head")
    answer.write(b"")
    assert transport.sent == [b"head"]


async def test_a_large_body_is_not_copied() -> None:
    answer, transport = joined()
    body = bytes(1 << 20)
    answer.write(b"head")
    answer.write(body)
    assert transport.sent == [b"head", body]
    assert transport.sent[1] is body


async def test_closing_sends_what_is_held_first_and_nothing_afterwards() -> None:
    answer, transport = joined()
    answer.write(b"head")
    answer.close()
    assert transport.sent == [b"head"]
    assert answer.is_closing()
    answer.write(b"late")
    await asyncio.sleep(0)
    assert transport.sent == [b"head"]


async def test_the_server_keeps_idle_connections_longer_than_clients_and_load_balancers() -> None:
    app = Starlette()
    app.state.parts = cast("Any", type("Parts", (), {"waiters": None}))
    web = Web(app, cast("Any", None), SystemClock())
    kept_s = web._server.config.timeout_keep_alive
    assert kept_s > pool._IDLE_S
    assert kept_s > 60


def test_a_server_may_open_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        raise_file_limit()
        raised, still = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert still == hard
    assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


def test_what_is_loaded_is_not_looked_at_for_garbage_again() -> None:
    threshold = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
