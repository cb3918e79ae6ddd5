"""FakeServer: what it records, how it runs, and the fixtures that come with it."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import anyio
import msgspec
import pytest

from tests.patience import PATIENCE_S
from tinkex.errors import InputError
from tinkex.testing import API_KEY, FakeClock, FakeServer
from tinkex.testing.plugin import (  # also without an installation
    tinkex_server,  # noqa: F401
    tinkex_service,  # noqa: F401
)
from tinkex.testing.recorder import route_name
from tinkex.transport.base import HttpRequest, Pool
from tinkex.types import Datum, ModelInput
from tinkex.wire.compression import compress
from tinkex.wire.proto_training import encode_forward_backward

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient

pytestmark = [pytest.mark.anyio, pytest.mark.req("S37")]

OPEN = msgspec.json.encode({"tags": [], "user_metadata": {}, "sdk_version": "x"})


def opening(**headers: str) -> HttpRequest:
    given = {"X-API-Key": "tml-secret-canary", **headers}
    return HttpRequest("POST", "/api/v1/create_session", Pool.SESSION, 60, headers=given, body=OPEN)


async def test_requests_are_recorded_without_their_key() -> None:
    clock = FakeClock()
    async with clock.running(), FakeServer(clock=clock) as server:
        await server.transport().send(opening(authorization="Bearer tml-secret-canary"))
        (seen,) = server.requests
    assert (seen.route, seen.method, seen.path) == (
        "create_session",
        "POST",
        "/api/v1/create_session",
    )
    assert seen.body["sdk_version"] == "x"
    assert "canary" not in repr(seen.headers)


async def test_a_training_batch_is_recorded_decoded() -> None:
    clock = FakeClock()
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    body = encode_forward_backward(model_id="m", seq_id=4, data=[datum], loss_fn="cross_entropy")
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    async with clock.running(), FakeServer(clock=clock) as server:
        await server.transport().send(
            HttpRequest(
                "POST",
                "/api/v1/forward_backward",
                Pool.TRAIN,
                60,
                headers={**headers, "x-api-key": API_KEY},
                body=compress(body),
            )
        )
        (seen,) = server.seen("forward_backward")
    assert seen.body.seq_id == 4
    assert seen.body.data == [datum]


async def test_recording_can_be_switched_off() -> None:
    clock = FakeClock()
    async with clock.running(), FakeServer(clock=clock, record=False) as server:
        await server.transport().send(opening())
    assert server.requests == []


async def test_a_transport_starts_the_server_and_its_clock_by_itself_and_ends_both() -> None:
    server = FakeServer(clock=FakeClock())
    transport = server.transport()
    await transport.send(opening())
    assert server.entered
    await server.clock.sleep(100)
    await transport.aclose()
    assert not server.entered
    await transport.aclose()
    with anyio.move_on_after(0.05) as scope:
        await server.clock.sleep(1)
    assert scope.cancelled_caught


def test_routes_are_recognised_below_a_prefix_and_with_two_part_checkpoints() -> None:
    path = "/base/api/v1/training_runs/s:train:0/checkpoints/weights/a/publish"
    assert route_name("POST", path) == "publish_checkpoint"
    assert route_name("DELETE", path.removesuffix("/publish")) == "delete_checkpoint"
    assert route_name("POST", "/api/v1/sessions/search") == "search_sessions"
    assert route_name("GET", "/elsewhere") is None


def test_virtual_time_and_real_sockets_do_not_mix() -> None:
    with pytest.raises(InputError, match="system clock"), FakeServer(clock=FakeClock()).serve():
        pass
    with pytest.raises(InputError, match="serve"):
        _ = FakeServer().url


def test_the_fixture_listens_on_loopback(tinkex_server: FakeServer) -> None:  # noqa: F811
    with urllib.request.urlopen(f"{tinkex_server.url}/api/v1/healthz", timeout=PATIENCE_S) as reply:
        assert msgspec.json.decode(reply.read()) == {"status": "ok"}
    assert tinkex_server.url.startswith("http://127.0.0.1:")


def test_samples_can_be_lost_from_another_thread(tinkex_server: FakeServer) -> None:  # noqa: F811
    tinkex_server.lose_samples()


def test_the_client_fixture_trains_and_samples(tinkex_service: ServiceClient) -> None:  # noqa: F811
    training = tinkex_service.create_lora_training_client(base_model="tinkex/tiny", rank=4)
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    result = training.forward_backward([datum], "cross_entropy").result(timeout=PATIENCE_S)
    assert result.metrics["loss:sum"] > 0
