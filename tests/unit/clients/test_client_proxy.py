"""Whole clients behind a proxy."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.forward_proxy import ForwardProxy
from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, datum
from tinkex import AdamParams, Config, ModelInput, ProxyError, SamplingParams, ServiceClient, errors
from tinkex.announcement import Announcement, announce
from tinkex.serving import embedded as embedded_server
from tinkex.testing import API_KEY, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER_INFO = "me:canary-p4ss"
PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def server(shared_server: FakeServer) -> Iterator[FakeServer]:
    yield shared_server
    shared_server.faults.clear()
    shared_server.requests.clear()


def train_and_sample(service: ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL)
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(AdamParams()).result(PATIENCE_S)
    sampler = training.save_weights_and_get_sampling_client()
    answer = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)).result(PATIENCE_S)
    assert len(answer.sequences[0].tokens) == 2


def test_a_client_trains_and_samples_through_the_proxy_and_by_no_other_way(server: FakeServer):
    with ForwardProxy(user_info=USER_INFO) as proxy:
        options = {"base_url": server.url, "api_key": API_KEY, "proxy": proxy.url(USER_INFO)}
        with ServiceClient(**options) as service:
            train_and_sample(service)
    asked = Counter(f"{one.method} {server.url}{one.path}" for one in server.requests)
    lines = [line.removesuffix(" HTTP/1.1") for line in proxy.request_lines]
    assert not asked - Counter(line.partition("?")[0] for line in lines)
    assert {one.route for one in server.requests} >= {"optim_step", "asample", "telemetry"}


def test_the_variables_are_obeyed_and_loopback_is_left_alone(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ForwardProxy(upstream=server.url.removeprefix("http://")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url())
        with ServiceClient(base_url="http://tinker.invalid", api_key=API_KEY) as service:
            assert service.get_server_capabilities().supported_models
        through = len(proxy.heads)
        assert through == len(server.requests)
        with ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            assert service.get_server_capabilities().supported_models
        assert len(proxy.heads) == through


def test_a_refusal_ends_the_first_call_at_once():
    with ForwardProxy(user_info=USER_INFO) as proxy:
        wrong = proxy.url("me:canary-wrong")
        with (
            ServiceClient(
                base_url="https://tinker.invalid", api_key="tml-x", proxy=wrong
            ) as service,
            pytest.raises(ProxyError, match="refused the user name or the password in proxy="),
        ):
            service.get_server_capabilities()
    assert proxy.connections == 1


@pytest.mark.req("S22")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_silent_proxy_does_not_hang_a_client(scheme: str):
    with ForwardProxy(silent=True) as proxy:
        config = Config(
            base_url=f"{scheme}://tinker.invalid",
            api_key="tml-x",
            proxy=proxy.url(),
            connect_timeout_s=0.05,
            bootstrap_deadline_s=0.05,
            telemetry=False,
        )
        with (
            ServiceClient(config=config) as service,
            pytest.raises(errors.APITimeoutError, match=proxy.url()),
        ):
            service.get_server_capabilities()


@pytest.mark.req("B1")
@pytest.mark.req("B9")
def test_the_proxys_password_is_in_no_event_log_repr_pickle_or_traceback(
    server: FakeServer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    with ForwardProxy(user_info=USER_INFO) as proxy:
        options = {"base_url": server.url, "api_key": API_KEY, "proxy": proxy.url(USER_INFO)}
        with ServiceClient(**options) as service:
            training = service.create_lora_training_client(MODEL)
            said = pickle.dumps(service.create_sampling_client(base_model=MODEL)).decode("latin-1")
            # A server that repeats whatever it could have been told.
            server.faults.on(
                "forward_backward", faults.reply(400, {"detail": proxy.url(USER_INFO)})
            )
            error = training.forward_backward([datum()], "cross_entropy").exception(PATIENCE_S)
            assert isinstance(error, errors.BadRequestError)
            said += repr(service.holder.config) + repr(error) + repr(vars(error))
            said += "".join(traceback.format_exception(error)) + repr(pickle.dumps(error))
            # Closing waits two seconds for it at most.
            deadline = server.clock.now() + PATIENCE_S
            while not any(b"user_error" in seen.raw_body for seen in server.seen("telemetry")):
                assert server.clock.now() < deadline
    said += b"".join(seen.raw_body for seen in server.seen("telemetry")).decode()
    assert "user_error" in said
    assert "canary" not in said + caplog.text


def test_the_embedded_server_is_reached_without_the_proxy(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    announce(tmp_path, Announcement(server.url, API_KEY, (MODEL,), 1))
    monkeypatch.setenv("TINKEX_EMBEDDED_SERVER", str(tmp_path))
    config = Config(embedded=True, embedded_models=(MODEL,), proxy="http://127.0.0.1:9")
    found = asyncio.run(embedded_server.connect(config))
    assert (found.base_url, found.proxy) == (server.url, None)
