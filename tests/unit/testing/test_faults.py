"""Faults: what each does to a client, in process and on a real socket."""

from __future__ import annotations

import http.client
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.patience import PATIENCE_S
from tinkex.errors import APIConnectionError, APITimeoutError
from tinkex.testing import API_KEY, FakeClock, FakeServer, faults
from tinkex.transport.base import HttpRequest, Pool, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.anyio, pytest.mark.req("S37")]

OPEN = msgspec.json.encode({"tags": [], "user_metadata": {}, "sdk_version": "x"})


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    clock = FakeClock()
    async with clock.running(), FakeServer(clock=clock) as running:
        yield running


async def send(server: FakeServer, path: str = "create_session", body: bytes = OPEN) -> Reply:
    headers = {"x-api-key": API_KEY, "content-type": "application/json"}
    request = HttpRequest("POST", f"/api/v1/{path}", Pool.REST, 45, headers=headers, body=body)
    return await server.transport().send(request)


async def heartbeat(server: FakeServer, session: str) -> Reply:
    body = msgspec.json.encode({"session_id": session})
    return await send(server, "session_heartbeat", body)


@pytest.mark.parametrize("form", ["retry-after-ms", "retry-after", "date", "none"])
async def test_a_429_carries_its_hint_in_the_chosen_form(server: FakeServer, form: Any) -> None:
    server.faults.on("create_session", faults.rate_limit(form, 7))
    reply = await send(server)
    assert reply.status == 429
    if form == "retry-after-ms":
        assert reply.headers["retry-after-ms"] == "7000"
    elif form == "retry-after":
        assert reply.headers["retry-after"] == "7"
    elif form == "date":
        when = parsedate_to_datetime(reply.headers["retry-after"])
        assert when.timestamp() == pytest.approx(server.clock.wall() + 7, abs=1)
    else:
        assert not [name for name in reply.headers if name.startswith("retry-after")]
    assert (await send(server)).status == 200


async def test_rules_strike_the_chosen_calls_and_are_written_down(server: FakeServer) -> None:
    server.faults.on("create_session", faults.reply(503), nth=1, times=2)
    assert [(await send(server)).status for _ in range(4)] == [200, 503, 503, 200]
    assert [fired.name for fired in server.faults.fired] == ["reply", "reply"]


async def test_a_predicate_sees_the_request(server: FakeServer) -> None:
    chosen = faults.reply(500)
    server.faults.on(None, chosen, times=None, when=lambda seen: seen.json.get("tags") == ["bad"])
    bad = OPEN.replace(b"[]", b'["bad"]')
    assert (await send(server)).status == 200
    assert [(await send(server, body=bad)).status for _ in range(2)] == [500, 500]
    server.faults.clear()
    assert (await send(server, body=bad)).status == 200


async def test_any_status_goes_with_or_without_a_length(server: FakeServer) -> None:
    server.faults.on(None, faults.reply(400, {"detail": "no"}, content_length=False))
    server.faults.on(None, faults.empty(400), nth=1)
    bare, empty = await send(server), await send(server)
    assert "content-length" not in bare.headers
    assert bare.body == b'{"detail":"no"}'
    assert empty.headers["content-length"] == "0"


async def test_pending_answers_say_what_the_script_says(server: FakeServer) -> None:
    server.faults.on("retrieve_future", faults.try_again("paused_capacity", "no room"))
    server.faults.on("retrieve_future", faults.request_timeout("paused_rate_limit", "slow"), nth=1)
    server.faults.on("retrieve_future", faults.request_timeout(), nth=2)
    server.faults.on("retrieve_future", faults.lost(), nth=3)
    replies = [await send(server, "retrieve_future", b'{"request_id":"r"}') for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 408, 408, 410]
    assert msgspec.json.decode(replies[0].body) == {
        "type": "try_again",
        "queue_state": "paused_capacity",
        "queue_state_reason": "no room",
        "request_id": "r",
    }
    assert msgspec.json.decode(replies[1].body)["queue_state"] == "paused_rate_limit"
    assert replies[2].body == b""


async def test_slow_is_late_and_hang_is_never(server: FakeServer) -> None:
    server.faults.on("create_session", faults.slow(40))
    server.faults.on("create_session", faults.hang(), nth=1)
    assert (await send(server)).status == 200
    assert server.clock.now() == 40
    with pytest.raises(APITimeoutError):
        await send(server)
    assert server.clock.now() == 85


async def test_a_drop_before_the_reply_is_a_broken_connection(server: FakeServer) -> None:
    server.faults.on("create_session", faults.drop())
    server.faults.on("create_session", faults.drop(handled=True), nth=1)
    for sessions in (0, 1):
        with pytest.raises(APIConnectionError):
            await send(server)
        assert len(await server.store.sessions()) == sessions


async def test_a_drop_in_the_middle_is_a_broken_connection_too(server: FakeServer) -> None:
    server.faults.on("create_session", faults.drop_midway())
    with pytest.raises(APIConnectionError):
        await send(server)


async def test_garbage_and_wrong_media_types_are_successes_that_are_none(
    server: FakeServer,
) -> None:
    server.faults.on("create_session", faults.garbage())
    server.faults.on("create_session", faults.wrong_media_type(), nth=1)
    nonsense, mislabelled = await send(server), await send(server)
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(nonsense.body)
    assert nonsense.status == mislabelled.status == 200
    assert mislabelled.headers["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize("effect", [faults.duplicate(), faults.duplicate_at_once()])
async def test_a_duplicated_delivery_runs_the_handler_twice(
    server: FakeServer, effect: Any
) -> None:
    server.faults.on("create_session", effect)
    assert (await send(server)).status == 200
    assert len(await server.store.sessions()) == 2
    assert len(server.seen("create_session")) == 1


async def test_a_trickle_arrives_whole_but_slowly(server: FakeServer) -> None:
    server.faults.on("create_session", faults.trickle(10, 0.5))
    reply = await send(server)
    assert "session_id" in msgspec.json.decode(reply.body)
    assert server.clock.now() > 1


async def test_a_session_can_end_behind_its_client_s_back(server: FakeServer) -> None:
    session = msgspec.json.decode((await send(server)).body)["session_id"]
    server.faults.on("session_heartbeat", faults.finish_session(), nth=1)
    assert [(await heartbeat(server, session)).status for _ in range(3)] == [200, 410, 410]


async def test_a_restart_loses_samples_and_nothing_else(server: FakeServer) -> None:
    session = msgspec.json.decode((await send(server)).body)["session_id"]
    chosen = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinkex/tiny"}
    await send(server, "create_sampling_session", msgspec.json.encode(chosen))
    sample = {
        "sampling_session_id": f"{session}:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    reply = await send(server, "asample", msgspec.json.encode(sample))
    server.faults.on("retrieve_future", faults.restart())
    poll = msgspec.json.encode({"request_id": msgspec.json.decode(reply.body)["request_id"]})
    assert (await send(server, "retrieve_future", poll)).status == 410
    assert (await heartbeat(server, session)).status == 200


# On real sockets: a broken connection must be broken for any HTTP client.


@pytest.fixture
def listening() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


def ask(server: FakeServer, timeout: float = PATIENCE_S) -> tuple[int, bytes]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("POST", "/api/v1/create_session", OPEN, {"X-API-Key": API_KEY})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_on_a_socket_a_drop_leaves_the_client_without_a_byte(listening: FakeServer) -> None:
    listening.faults.on("create_session", faults.drop())
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask(listening)
    assert ask(listening)[0] == 200


def test_on_a_socket_half_a_reply_is_half_a_reply(listening: FakeServer) -> None:
    listening.faults.on("create_session", faults.drop_midway())
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        ask(listening)
    assert ask(listening)[0] == 200


def test_on_a_socket_a_reply_without_a_length_is_chunked(listening: FakeServer) -> None:
    listening.faults.on("create_session", faults.reply(400, b"{}", content_length=False))
    assert ask(listening) == (400, b"{}")


def test_a_server_with_a_hanging_request_still_stops() -> None:
    server = FakeServer()
    server.faults.on("create_session", faults.hang())
    with server.serve(), pytest.raises(TimeoutError):
        ask(server, timeout=0.2)
