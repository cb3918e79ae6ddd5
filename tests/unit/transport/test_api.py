"""Calls: encoding, the one retry loop, decoding, errors."""

from __future__ import annotations

import logging
import pickle

import pytest
from transport_fakes import Answer, ScriptedTransport, StillClock, json_reply

from tests.own_thread import own_records
from tinkex import types
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    CredentialError,
    InputTypeError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from tinkex.transport.api import Api, connect
from tinkex.transport.auth import Credentials
from tinkex.transport.base import Pool, Reply
from tinkex.wire import bodies, json_codec, routes

pytestmark = pytest.mark.anyio

OK = json_reply('{"request_id": "r1"}')
CONFIG = types.ClientConfigRequest(sdk_version="1")


def refused() -> APIConnectionError:
    return APIConnectionError(message="Nothing listens at http://h; check TINKER_BASE_URL.")


def api_with(clock: StillClock, *answers: Answer, **settings) -> tuple[Api, ScriptedTransport]:
    config = Config(**{"base_url": "http://h:1/p", "api_key": "tml-key", **settings})
    transport = ScriptedTransport(list(answers))
    return Api(config, transport, clock, Credentials(config, clock), jitter=lambda: 0.0), transport


def optim_step() -> bytes:
    return b'{"model_id": "m"}'


async def test_a_call_encodes_sends_and_decodes(clock: StillClock):
    api, transport = api_with(clock, json_reply('{"pjwt_auth_enabled": false, "future_flag": 1}'))
    flags = await api.call(routes.CLIENT_CONFIG, CONFIG)
    assert flags == types.ClientConfigResponse()
    (request,) = transport.requests
    assert (request.method, request.path) == ("POST", "/api/v1/client/config")
    assert request.body == json_codec.encode(CONFIG)
    assert request.pool is Pool.SESSION
    headers = request.headers
    assert headers["X-API-Key"] == "tml-key"
    assert headers["Accept"] == headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("tinkex/")
    assert headers["X-Idempotency-Key"].startswith("tinkex-")
    assert "x-stainless-retry-count" not in headers


async def test_a_read_has_no_body_no_content_type_and_no_idempotency_key(clock: StillClock):
    api, transport = api_with(clock, json_reply('{"status": "ok"}'))
    await api.call(routes.HEALTHZ)
    (request,) = transport.requests
    assert request.body is None
    assert not {"Content-Type", "X-Idempotency-Key"} & set(request.headers)
    assert request.headers["x-sdk-version"]


async def test_params_and_query_reach_the_url(clock: StillClock):
    api, transport = api_with(clock, json_reply(""))
    await api.call(
        routes.PUBLISH_CHECKPOINT,
        params={"run": "s:train:0", "ckpt": "weights/a b"},
        query={"x": [1, 2]},
    )
    (request,) = transport.requests
    assert request.path == "/api/v1/training_runs/s:train:0/checkpoints/weights/a%20b/publish"
    assert request.query == "x=1%2C2"


async def test_an_empty_result_ignores_body_and_media_type(clock: StillClock):
    api, _ = api_with(clock, Reply(204, {}, b"<html>"))
    result = await api.call(routes.CANCEL_FUTURE, bodies.CancelFutureRequest(request_id="r"))
    assert result is None


async def test_the_callers_headers_win_and_a_given_body_is_sent_as_it_is(clock: StillClock):
    api, transport = api_with(clock, OK, headers={"CF-Access-Client-Id": "id"})
    await api.call(routes.FORWARD_BACKWARD, body=b"proto", headers={"Content-Encoding": "zstd"})
    (request,) = transport.requests
    assert request.body == b"proto"
    assert request.headers["Content-Type"] == "application/x-protobuf"
    assert request.headers["Content-Encoding"] == "zstd"
    assert request.headers["CF-Access-Client-Id"] == "id"


async def test_a_missing_request_or_body_is_the_callers_mistake(clock: StillClock):
    api, transport = api_with(clock, OK)
    with pytest.raises(InputTypeError):
        await api.call(routes.CLIENT_CONFIG)
    with pytest.raises(InputTypeError):
        await api.call(routes.FORWARD_BACKWARD)
    assert transport.requests == []


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.req("S13")
async def test_failures_are_retried_with_backoff_and_one_idempotency_key(clock: StillClock):
    api, transport = api_with(clock, refused(), json_reply("{}", 503), APITimeoutError(), OK)
    reply = await api.call(routes.OPTIM_STEP, body=optim_step())
    assert reply.request_id == "r1"
    assert clock.sleeps == [0.5, 1.0, 2.0]
    keys = {request.headers["X-Idempotency-Key"] for request in transport.requests}
    assert len(keys) == 1
    counts = [r.headers.get("x-stainless-retry-count") for r in transport.requests]
    assert counts == [None, "1", "2", "3"]
    await api.call(routes.OPTIM_STEP, body=optim_step())
    assert transport.requests[-1].headers["X-Idempotency-Key"] not in keys


@pytest.mark.req("S14")
async def test_a_429_waits_as_long_as_the_server_says(clock: StillClock):
    api, _ = api_with(clock, json_reply("{}", 429, retry_after_ms="250"), OK)
    await api.call(routes.OPTIM_STEP, body=optim_step())
    assert clock.sleeps == [0.25]


@pytest.mark.req("S15")
@pytest.mark.parametrize(
    "route", [routes.ASAMPLE, routes.SESSION_HEARTBEAT, routes.TELEMETRY, routes.RETRIEVE_FUTURES]
)
async def test_classes_with_a_loop_of_their_own_or_none_get_one_attempt(clock, route):
    for answer in (refused(), json_reply("{}", 429), json_reply("{}", 503)):
        api, transport = api_with(clock, answer, OK)
        with pytest.raises(APIError):
            await api.call(route, body=b"{}")
        assert len(transport.requests) == 1
    assert clock.sleeps == []


@pytest.mark.req("S22")
async def test_an_unreachable_server_ends_at_the_deadline_with_the_cause(clock: StillClock):
    api, transport = api_with(clock, refused())
    with pytest.raises(APIConnectionError, match="Nothing listens") as caught:
        await api.call(routes.OPTIM_STEP, body=optim_step())
    assert clock.time == 300.0
    assert "gave up after" in caught.value.__notes__[0]
    assert len(transport.requests) == len(clock.sleeps) + 1


async def test_a_deadline_of_the_call_bounds_attempts_and_waits(clock: StillClock):
    api, transport = api_with(clock, refused())
    with pytest.raises(APIConnectionError):
        await api.call(routes.OPTIM_STEP, body=optim_step(), deadline_s=3.0)
    assert clock.time == 3.0
    timeouts = [request.timeout_s for request in transport.requests]
    assert timeouts == [3.0, 2.5, 1.5, 1.0]


async def test_a_deadline_of_zero_means_one_attempt(clock: StillClock):
    api, transport = api_with(clock, refused())
    with pytest.raises(APIConnectionError):
        await api.call(routes.OPTIM_STEP, body=optim_step(), deadline_s=0.0)
    assert (len(transport.requests), clock.time) == (1, 0.0)
    assert transport.requests[0].timeout_s == routes.OPTIM_STEP.timeout_s


async def test_a_conflict_surfaces_within_seconds(clock: StillClock):
    api, transport = api_with(clock, json_reply('{"detail": "already published"}', 409))
    with pytest.raises(ConflictError, match="already published"):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    assert len(transport.requests) == 3
    assert clock.time < 3


async def test_a_402_is_waited_out_with_one_warning_a_minute(clock: StillClock, caplog):
    api, _ = api_with(clock, *[json_reply("{}", 402)] * 130, OK)
    await api.call(routes.OPTIM_STEP, body=optim_step())
    assert clock.time == 650.0  # more than the budget of 300 s, which a pause does not use up
    warnings = [r for r in caplog.records if "cannot pay" in r.getMessage()]
    assert len(warnings) == 11


@pytest.mark.req("B8")
async def test_a_402_on_the_first_request_is_a_billing_error_at_its_limit(clock: StillClock):
    api, _ = api_with(clock, json_reply("{}", 402))
    with pytest.raises(BillingError):
        await api.call(routes.CLIENT_CONFIG, CONFIG)
    assert clock.time <= 3600.0
    api, transport = api_with(clock, json_reply("{}", 402))
    with pytest.raises(BillingError):
        await api.call(routes.CREATE_SESSION, body=b"{}")
    assert len(transport.requests) == 1


async def test_a_deadline_of_the_call_also_ends_a_402_pause(clock: StillClock):
    api, _ = api_with(clock, json_reply("{}", 402))
    with pytest.raises(BillingError):
        await api.call(routes.CLIENT_CONFIG, CONFIG, deadline_s=12.0)
    assert clock.time == 10.0


async def test_an_empty_400_is_a_connection_error_and_retried(clock: StillClock):
    for edge in (Reply(400, {"content-length": "0"}, b""), Reply(400, {}, b"<html>")):
        api, transport = api_with(clock, edge, OK)
        await api.call(routes.OPTIM_STEP, body=optim_step())
        assert len(transport.requests) == 2


async def test_a_400_with_a_json_body_is_the_callers_error_even_without_a_length(clock):
    api, _ = api_with(clock, Reply(400, {}, b'{"detail": "bad"}'))
    with pytest.raises(BadRequestError, match="bad"):
        await api.call(routes.OPTIM_STEP, body=optim_step())


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.req("B8")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (404, NotFoundError),
        (418, APIStatusError),
        (429, RateLimitError),
        (302, APIStatusError),
        (503, InternalServerError),
    ],
)
def test_a_status_becomes_its_error_which_pickles(clock, status, kind):
    api, _ = api_with(clock, OK)
    reply = json_reply('{"detail": "why"}', status, x_request_id="rq", set_cookie="secret")
    with pytest.raises(kind) as caught:
        api.raise_for(reply, routes.GET_INFO)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is kind
    assert (error.status_code, error.body) == (status, {"detail": "why"})
    assert str(error) == f"Error code: {status} - {{'detail': 'why'}}"
    assert error.request_id == "rq"
    assert error.response.request.url == "http://h:1/p/api/v1/get_info"
    assert "set-cookie" not in error.response.headers


def test_a_success_raises_nothing_and_a_text_body_stays_text(clock: StillClock):
    api, _ = api_with(clock, OK)
    for status in (200, 201, 204, 299):
        api.raise_for(json_reply("", status), routes.GET_INFO)
    with pytest.raises(InternalServerError, match="Error code: 502 - <html>"):
        api.raise_for(json_reply("<html>", 502), routes.GET_INFO)


@pytest.mark.req("B20")
def test_a_refused_credential_says_which_setting_to_check(clock: StillClock):
    api, _ = api_with(clock, OK)
    with pytest.raises(AuthenticationError) as caught:
        api.raise_for(json_reply("{}", 401), routes.GET_INFO)
    assert "TINKER_API_KEY" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"session_id": 5}', b'{"session_id": null}', b"\xff"]
)
async def test_an_answer_that_breaks_the_protocol_names_where_and_is_not_retried(clock, body):
    api, transport = api_with(clock, Reply(200, {}, body), OK)
    with pytest.raises(APIResponseValidationError, match="create_session breaks the protocol"):
        await api.call(routes.CREATE_SESSION, body=b"{}")
    assert len(transport.requests) == 1


async def test_a_wrong_member_is_named_by_its_path(clock: StillClock):
    api, _ = api_with(clock, json_reply('{"session_id": 5}'))
    with pytest.raises(APIResponseValidationError, match="session_id"):
        await api.call(routes.CREATE_SESSION, body=b"{}")


async def test_without_a_credential_nothing_is_sent(clock: StillClock):
    api, transport = api_with(clock, OK, api_key=None)
    with pytest.raises(CredentialError, match="TINKER_API_KEY"):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    with pytest.raises(CredentialError):
        await api.send(routes.ASAMPLE, b"{}")
    assert transport.requests == []


# -- one attempt ----------------------------------------------------------------------------------


@pytest.mark.req("S15")
async def test_send_is_one_attempt_and_any_status_is_a_reply(clock: StillClock):
    api, transport = api_with(clock, json_reply("{}", 429), refused())
    reply = await api.send(routes.ASAMPLE, b"{}", timeout_s=7.0, headers={"X-A": "1"})
    assert reply.status == 429
    assert transport.requests[0].timeout_s == 7.0
    assert transport.requests[0].headers["X-A"] == "1"
    with pytest.raises(APIConnectionError):
        await api.send(routes.ASAMPLE, b"{}")
    assert clock.sleeps == []


async def test_a_poll_carries_no_idempotency_key(clock: StillClock):
    api, transport = api_with(clock, OK)
    await api.send(routes.RETRIEVE_FUTURE, b"{}")
    assert "X-Idempotency-Key" not in transport.requests[0].headers


# -- log lines ------------------------------------------------------------------------------------


@pytest.mark.req("B7")
async def test_the_first_connection_failure_is_logged_with_cause_and_next_step(clock, caplog):
    api, _ = api_with(clock, refused(), refused(), refused(), OK)
    with caplog.at_level(logging.WARNING):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    (record,) = own_records(caplog)
    assert record.levelno == logging.WARNING
    assert "Nothing listens" in record.getMessage()
    assert "TINKER_BASE_URL" in record.getMessage()


async def test_a_long_outage_is_logged_again_every_minute(clock: StillClock, caplog):
    api, _ = api_with(clock, refused())
    with caplog.at_level(logging.WARNING), pytest.raises(APIConnectionError):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    assert 4 <= len(own_records(caplog)) <= 6


async def test_deprecation_notes_are_logged_once_at_their_level(clock: StillClock, caplog):
    soft = json_reply('{"request_id": "r"}', x_deprecation_note="old thing")
    hard = json_reply(
        '{"request_id": "r"}', x_deprecation_note="gone soon", x_deprecation_level="error"
    )
    api, _ = api_with(clock, soft, soft, hard)
    for _ in range(3):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    assert [(r.levelno, r.getMessage()) for r in own_records(caplog)] == [
        (logging.WARNING, "old thing"),
        (logging.ERROR, "gone soon"),
    ]


# -- tokens ---------------------------------------------------------------------------------------


async def test_the_servers_flags_turn_the_exchange_on(clock: StillClock):
    import base64

    claims = base64.urlsafe_b64encode(b'{"exp": 9999999999}').decode()
    token = f"eyJ.{claims}.s"
    api, transport = api_with(
        clock,
        json_reply('{"pjwt_auth_enabled": true}'),
        json_reply(f'{{"jwt": "{token}"}}'),
        OK,
    )
    api.follow(await api.call(routes.CLIENT_CONFIG, CONFIG))
    await api.call(routes.OPTIM_STEP, body=optim_step())
    await api.call(routes.OPTIM_STEP, body=optim_step())
    asked = [(r.path[8:], r.headers["X-API-Key"]) for r in transport.requests]
    assert asked == [
        ("client/config", "tml-key"),
        ("auth/token", "tml-key"),
        ("optim_step", token),
        ("optim_step", token),
    ]
    assert transport.requests[1].body == b"{}"


async def test_connect_does_no_io_and_close_closes_the_transport(clock: StillClock):
    transport = ScriptedTransport([OK])
    api = connect(Config(api_key="tml-x"), transport, clock)
    assert api.client_config == types.ClientConfigResponse()
    assert api.dynamic_config == types.ClientDynamicConfigResponse()
    await api.aclose()
    assert transport.closed
    assert transport.requests == []


@pytest.mark.req("S30")
async def test_two_apis_with_different_servers_and_keys_do_not_mix(clock: StillClock):
    one, sent_one = api_with(clock, OK, base_url="http://a", api_key="tml-a")
    two, sent_two = api_with(clock, OK, base_url="http://b", api_key="tml-b")
    for api in (one, two):
        await api.call(routes.OPTIM_STEP, body=optim_step())
    assert sent_one.requests[0].headers["X-API-Key"] == "tml-a"
    assert sent_two.requests[0].headers["X-API-Key"] == "tml-b"
