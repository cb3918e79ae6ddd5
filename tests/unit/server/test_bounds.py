"""Hostile numbers, texts and bodies: a short refusal, never a 500, and little time on the loop."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from backports import zstd

from tests.unit.wire.test_wire_bounded import packed_shape
from tinkex.types.bounds import JSON_VALUES
from tinkex.wire.routes import ROUTES

from .conftest import PROTOBUF
from .test_operations_pages import metrics

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

    from .conftest import Api

pytestmark = pytest.mark.anyio

ZSTD = {"content-encoding": "zstd"}
MANY_DIGITS = "9" * 5_000


def short(reply: Reply, *statuses: int) -> str:
    """The detail of a refusal, which quotes little of what was sent."""
    assert reply.status in (statuses or (400, 404, 413)), reply
    assert len(reply.body) < 1_500
    return msgspec.json.decode(reply.body).get("detail", "")


async def test_numbers_of_queries_have_bounds(api: Api) -> None:
    for path in ("/sessions", "/training_runs", "/checkpoints"):
        for name in ("offset", "limit"):
            for text in (MANY_DIGITS, "-1", "1000000001", "²", "1e3", "0x10"):
                reply = await api.call("GET", path, query=f"{name}={text}")
                assert "whole number from 0 to 1000" in short(reply, 400)
            assert (await api.call("GET", path, query=f"{name}=0000000010")).status == 200


async def test_a_version_of_very_many_digits_is_no_version(api: Api) -> None:
    headers = {"x-stainless-package-version": f"0.{MANY_DIGITS}.0"}
    assert (await api.call("GET", "/checkpoints", headers=headers)).status == 200


@pytest.mark.parametrize("seq_id", [2**62 + 1, 2**63 - 1, 2**63, -1, -(2**63), 10**30, 10**4_000])
async def test_a_number_outside_the_order_is_refused_at_once(api: Api, seq_id: int) -> None:
    model = await api.model()
    step = {"adam_params": {"learning_rate": 0.1}}
    batch = {"data": [], "loss_fn": "cross_entropy"}
    for path, body in {
        "/optim_step": step,
        "/save_weights": {"path": "a"},
        "/save_weights_for_sampler": {"path": "a"},
        "/save_weights_external": {"path": "a"},
        "/load_weights": {"path": "tinker://a/weights/b", "optimizer": False},
        "/forward_backward": {"forward_backward_input": batch},
        "/forward": {"forward_input": batch},
        "/tinkex/release_numbers": {"seq_ids": [seq_id]},
    }.items():
        # msgspec does not write such numbers.
        data = json.dumps({"model_id": model, "seq_id": seq_id, **body}).encode()
        short(await api.call("POST", path, data), 400)
    assert (await api.result(await api.step(model, 1)))["metrics"]


async def test_the_largest_number_is_accepted_and_the_model_goes_on(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.step(model, 2**62)
    body = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    short(await api.call("POST", "/optim_step", {**body, "seq_id": 2**62 + 1}), 400)
    other = await api.model(session, 1)
    assert (await api.result(await api.step(other, 1)))["metrics"]


def bodies() -> list[tuple[str, str]]:
    """The paths that take JSON, with one of their integers if they have one."""
    from tests.unit.wire.test_wire_bounded import plain

    found: list[tuple[str, str]] = []
    for route in ROUTES:
        if route.method == "POST" and route.request is not None and "{" not in route.path:
            fields = getattr(route.request, "__struct_fields__", ())
            numbers = [
                field.name
                for field in (msgspec.structs.fields(route.request) if fields else ())
                if int in plain(field.type)
            ]
            found += [(route.path.removeprefix("/api/v1"), name) for name in numbers or ["seq_id"]]
    return found


@pytest.mark.parametrize(("path", "name"), bodies())
async def test_no_json_makes_a_route_fail(api: Api, path: str, name: str) -> None:
    deep = "[" * 2_000 + "]" * 2_000
    for value in (f'"{"x" * 5_000}"', "9" * 400, MANY_DIGITS, "-1e999", deep, f'{{"a":{deep}}}'):
        for member in (name, "user_metadata", "model_id", "session_id", "other"):
            reply = await api.call("POST", path, f'{{"{member}":{value}}}'.encode())
            assert reply.status in (200, 400, 404, 410, 413, 422), (member, value[:30], reply)
            assert len(reply.body) < 3_000


async def test_a_very_long_id_reaches_neither_the_log_nor_the_store(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    long = "m" * 3_900_000
    for path, member in {
        "/get_info": "model_id",
        "/optim_step": "model_id",
        "/session_heartbeat": "session_id",
        "/retrieve_future": "request_id",
        "/join_sampling_session": "sampling_session_id",
        "/weights_info": "tinker_path",
    }.items():
        short(await api.call("POST", path, {member: long}), 400)
    headers = {"x-idempotency-key": "k" * 10_000}
    body = {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": "tinkex/tiny"}
    short(await api.call("POST", "/asample", {**body, "num_samples": 1}, headers=headers), 400)
    short(await api.call("GET", f"/sessions/{'s' * 5_000}"), 404)
    assert max(len(record.getMessage()) for record in caplog.records) < 2_000


def strings(count: int) -> bytes:
    return b'{"x":[' + b'"a",' * count + b'"a"]}'


def tokens(count: int) -> bytes:
    return (
        b'{"num_samples":1,"sampling_params":{},"base_model":"tinkex/tiny","prompt":{"chunks":'
        b'[{"type":"encoded_text","tokens":[' + b"1," * count + b"1]}]}}"
    )


def chunks(count: int) -> bytes:
    one = b'{"type":"encoded_text","tokens":[1]}'
    return (
        b'{"num_samples":1,"sampling_params":{},"base_model":"tinkex/tiny","prompt":{"chunks":['
        + b",".join([one] * count)
        + b"]}}"
    )


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/create_session", strings(JSON_VALUES), "values"),
        ("/create_session", strings(8 * JSON_VALUES), "bytes"),
        ("/telemetry", strings(12 * JSON_VALUES), "values"),
        ("/asample", tokens(8 * JSON_VALUES), "values"),
        ("/asample", chunks(20_000), "chunks"),
        ("/asample", chunks(140_000), "lists and objects"),
        ("/create_session", b'{"a":' + b"[" * 1_000_000, "lists and objects"),
        ("/forward_backward", strings(20 * JSON_VALUES), "values"),
        ("/forward_backward", b'{"model_id":"' + b"m" * 4_000_000 + b'","seq_id":1}', "model_id"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
async def test_small_bodies_of_much_work_are_refused_before_they_are_decoded(
    api: Api, path: str, body: bytes, words: str, packed: bool
) -> None:
    sent = zstd.compress(body) if packed else body
    reply = await api.call("POST", path, sent, headers=ZSTD if packed else {})
    assert words in short(reply, 400, 413)


async def test_texts_may_be_full_of_signs(api: Api) -> None:
    text = '[{",' * 300_000
    events = [
        {
            "event": "UNHANDLED_EXCEPTION",
            "event_id": "1",
            "event_session_index": 0,
            "severity": "ERROR",
            "timestamp": "2026-01-01T00:00:00Z",
            "error_message": "m",
            "error_type": "t",
            "traceback": text.replace('"', "")[:900_000],
        }
    ]
    body = {"platform": "p", "sdk_version": "1", "session_id": "s", "process_uuid": "u"}
    reply = await api.call("POST", "/telemetry", {**body, "events": events})
    assert reply.status == 200, reply


async def test_a_tensor_of_a_million_dimensions_fails_in_its_turn(api: Api) -> None:
    model = await api.model()
    body = packed_shape(1_000_000).replace(b"\x0a\x01m", b"", 1)
    body = b"\x0a" + bytes([len(model)]) + model.encode() + body
    packed = zstd.compress(body)
    assert len(packed) < 1_000
    headers = {"content-type": PROTOBUF, **ZSTD}
    outcome = await api.outcome(await api.post("/forward_backward", packed, headers=headers))
    assert "8 dimensions" in outcome["error"]
    assert len(outcome["error"]) < 300
    assert (await api.result(await api.step(model, 2)))["metrics"]


async def test_the_record_of_a_request_says_what_it_took(api: Api) -> None:
    body = json.dumps({"tags": ["a"] * 9, "user_metadata": {}, "sdk_version": "1"}).encode()
    packed = zstd.compress(body + b" " * 400_000)
    assert (await api.call("POST", "/create_session", packed, headers=ZSTD)).status == 200
    found, route = await metrics(api), (("route", "create_session"),)
    assert found["request_bytes_total", route] == len(packed)
    assert found["loop_longest_cpu_seconds", route] > 0


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"prompt_alt_tokens_k": 10**7}, "prompt_alt_tokens_k"),
        ({"topk_prompt_logprobs": 1025}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 2**40}, "topk_sample_logprobs"),
        ({"num_samples": 10**6}, "num_samples"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 2**40}}, "max_tokens"),
        ({"sampling_params": {"stop": ["a"] * 65}}, "stop"),
        ({"sampling_params": {"stop": "a" * 2_000}}, "stop"),
        ({"target_prompt_logprobs": {"dtype": "int64", "data": [], "shape": [1] * 9}}, "shape"),
    ],
)
async def test_every_count_of_a_sample_has_a_bound(api: Api, members: Any, name: str) -> None:
    sampler = await api.sampler(await api.session())
    body = {
        "sampling_session_id": sampler,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
    }
    assert name in short(await api.call("POST", "/asample", {**body, **members}), 400)


async def test_counts_that_are_too_much_together_fail_the_sample(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    members = {"num_samples": 1024, "topk_sample_logprobs": 1024, "sampling_params": {}}
    failed = await api.outcome(await api.sample(sampler, 0, **members))
    assert failed["category"] == "user"
    assert failed["error"].startswith("topk_sample_logprobs: asks for up to")
    assert len(failed["error"]) < 300
