import json
import math

import numpy as np
import pytest

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire.proto_sampling import encode_sample_response
from tinkex.wire.proto_training import encode_forward_backward_output
from tinkex.wire.results import (
    ACCEPT,
    FailedResult,
    MetadataOnly,
    PendingResult,
    ReadyResult,
    decode_pending,
    decode_result,
    encode_result,
    parse_category,
)
from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF, ROUTES

SAMPLE = types.SampleResponse(
    [
        types.SampledSequence(
            "stop", "q-0", tokens=[1, 2], logprobs=[-1.5, -2.0], topk_logprobs=[[(1, -1.5)], None]
        )
    ],
    prompt_logprobs_np=np.array([np.nan, -0.5], "f4"),
    topk_prompt_logprobs_np=types.TopkLogprobs.from_lists([None, [(3, -0.5), (4, -1.0)]]),
    prompt_cache_hit_tokens=1,
)
OUTPUT = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData([-1.0, -2.0], "float32", [2])}],
    {"loss:sum": 3.0, "odd:max": math.inf},
)


def read(body: object, request_type: str = "OptimStep", **options: object):
    return decode_result(request_type, MEDIA_JSON, json.dumps(body).encode(), **options)


def test_protobuf_is_a_result_whatever_else_the_header_says():
    media = "Application/X-Protobuf; charset=binary"
    outcome = decode_result("Sample", media, encode_sample_response(SAMPLE), ["q-0"])
    assert outcome == ReadyResult(SAMPLE)
    for kind in ("Forward", "ForwardBackward"):
        outcome = decode_result(kind, media, encode_forward_backward_output(OUTPUT))
        assert outcome == ReadyResult(OUTPUT)


def test_try_again_comes_before_every_other_reading():
    answer = {"type": "try_again", "status": "complete_metadata", "error": "x"}
    assert read(answer) == PendingResult("unknown", None)


@pytest.mark.req("S17")
@pytest.mark.parametrize("state", ["active", "paused_rate_limit", "paused_capacity"])
def test_the_queue_state_and_its_reason_are_read(state: str):
    answer = {"type": "try_again", "queue_state": state, "queue_state_reason": "busy"}
    assert read(answer) == PendingResult(state, "busy")


@pytest.mark.req("S17")
@pytest.mark.parametrize("state", ["on_holiday", None, 3, ["active"]])
def test_an_unheard_of_queue_state_is_unknown(state: object):
    answer = {"type": "try_again", "queue_state": state, "queue_state_reason": 5}
    assert read(answer) == PendingResult("unknown", None)


def test_metadata_only_comes_before_failure():
    answer = {"status": "complete_metadata", "response_payload_size": 99, "error": None}
    assert read(answer) == MetadataOnly(99)
    assert read({"status": "complete_metadata"}) == MetadataOnly(0)


@pytest.mark.parametrize("size", [-1, "9", 1.5, True, []])
def test_a_size_that_is_none_is_an_input_error(size: object):
    with pytest.raises(InputError, match="response_payload_size"):
        read({"status": "complete_metadata", "response_payload_size": size})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"error": "bad", "category": "user"}, FailedResult("bad", "user")),
        ({"error": None}, FailedResult("", "unknown")),
        ({"error": {"code": 3}, "category": "server"}, FailedResult('{"code":3}', "server")),
        ({"error": "bad", "category": "USER", "metrics": {}}, FailedResult("bad", "user")),
    ],
)
def test_a_member_named_error_is_a_failure_whatever_it_holds(
    answer: object, expected: FailedResult
):
    assert read(answer) == expected


@pytest.mark.req("S11")
@pytest.mark.parametrize(
    ("value", "category"),
    [
        ("user", "user"),
        ("User", "user"),
        ("SERVER", "server"),
        ("Unknown", "unknown"),
        ("cosmic", "unknown"),
        (None, "unknown"),
        (7, "unknown"),
    ],
)
def test_categories_are_read_in_any_case(value: object, category: str):
    assert parse_category(value) == category


@pytest.mark.parametrize(
    ("request_type", "answer", "value"),
    [
        ("OptimStep", {}, types.OptimStepResponse()),
        ("OptimStep", {"metrics": {"a": 1}}, types.OptimStepResponse(metrics={"a": 1.0})),
        ("SaveWeights", {"path": "p"}, types.SaveWeightsResponse(path="p")),
        (
            "SaveWeightsForSampler",
            {"sampling_session_id": "s"},
            types.SaveWeightsForSamplerResponseInternal(sampling_session_id="s"),
        ),
        (
            "SaveWeightsExternal",
            {"path": "p", "size_bytes": 3},
            types.SaveWeightsExternalResponseInternal(path="p", size_bytes=3),
        ),
        ("LoadWeights", {}, types.LoadWeightsResponse()),
        ("CreateModel", {"model_id": "m"}, types.CreateModelResponse(model_id="m")),
        ("CreateCustomLoss", {"loss_id": "l"}, types.CreateCustomLossResponse(loss_id="l")),
        ("UnloadModel", {"model_id": "m"}, types.UnloadModelResponse(model_id="m")),
    ],
)
def test_anything_else_is_the_result_of_its_request_type(
    request_type: str, answer: dict, value: object
):
    assert read(answer, request_type) == ReadyResult(value)
    assert read({**answer, "unheard_of": [1]}, request_type) == ReadyResult(value)
    media, body = encode_result(request_type, ReadyResult(value))
    assert decode_result(request_type, media, body) == ReadyResult(value)


def test_every_kind_of_future_has_a_reader():
    covered = {"OptimStep", "SaveWeights", "SaveWeightsForSampler", "SaveWeightsExternal"}
    covered |= {"LoadWeights", "CreateModel", "CreateCustomLoss", "UnloadModel"}
    covered |= {"Sample", "Forward", "ForwardBackward"}
    assert {route.request_type for route in ROUTES} - {None} == covered


def test_a_result_without_a_required_member_is_an_input_error():
    with pytest.raises(InputError, match="path"):
        read({}, "SaveWeights")


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b"null", b'"x"', b"{", b'{"a":NaN}'])
def test_an_answer_that_is_no_json_object_is_an_input_error(body: bytes):
    with pytest.raises(InputError):
        decode_result("OptimStep", MEDIA_JSON, body)


def test_a_protobuf_answer_for_a_json_result_is_an_input_error():
    with pytest.raises(InputError, match="OptimStep result is JSON"):
        decode_result("OptimStep", MEDIA_PROTOBUF, b"")


def test_a_sample_without_sequence_ids_is_an_input_error():
    with pytest.raises(InputError, match="sample_sequence_ids"):
        decode_result("Sample", MEDIA_PROTOBUF, encode_sample_response(SAMPLE))
    with pytest.raises(InputError, match="1 sequences for 2"):
        decode_result("Sample", MEDIA_PROTOBUF, encode_sample_response(SAMPLE), ["a", "b"])


@pytest.mark.parametrize(
    "outcome",
    [
        PendingResult("active", None),
        PendingResult("paused_capacity", "no free slots"),
        PendingResult(),
        MetadataOnly(1234),
        FailedResult("out of memory", "server"),
    ],
)
def test_what_the_server_answers_is_what_the_client_reads(outcome: object):
    media, body = encode_result("Sample", outcome, request_id="r")
    assert media == MEDIA_JSON
    assert decode_result("Sample", media, body) == outcome


def test_the_readers_accept_header_decides_the_form_of_a_sample():
    assert ACCEPT["Sample"] == MEDIA_PROTOBUF
    media, body = encode_result("Sample", ReadyResult(SAMPLE), accept="application/x-protobuf")
    assert media == MEDIA_PROTOBUF
    assert decode_result("Sample", media, body, ["q-0"]) == ReadyResult(SAMPLE)
    media, body = encode_result("Sample", ReadyResult(SAMPLE), accept="application/json")
    assert media == MEDIA_JSON
    assert decode_result("Sample", media, body, ["q-0"]) == ReadyResult(SAMPLE)


def test_an_old_readers_sample_has_the_old_shape():
    _, body = encode_result("Sample", ReadyResult(SAMPLE), accept="application/json")
    assert json.loads(body) == {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop",
                "tokens": [1, 2],
                "logprobs": [-1.5, -2.0],
                "topk_logprobs": [[[1, -1.5]], None],
            }
        ],
        "prompt_logprobs": [None, -0.5],
        "topk_prompt_logprobs": [None, [[3, -0.5], [4, -1.0]]],
        "prompt_cache_hit_tokens": 1,
    }


def test_an_old_readers_training_result_has_no_sparse_members():
    _, body = encode_result("Forward", ReadyResult(OUTPUT), accept="application/json")
    assert json.loads(body) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 3.0, "odd:max": "Infinity"},
    }
    assert decode_result("Forward", MEDIA_JSON, body) == ReadyResult(OUTPUT)


def test_a_metric_that_is_not_finite_reaches_the_reader():
    value = types.OptimStepResponse(metrics={"grad_norm": math.inf})
    media, body = encode_result("OptimStep", ReadyResult(value))
    assert decode_result("OptimStep", media, body) == ReadyResult(value)


@pytest.mark.parametrize("metrics", [{"a": "fast"}, {"a": None}, {"a": [1]}, [1]])
@pytest.mark.parametrize("kind", ["OptimStep", "Forward"])
def test_a_metric_that_is_no_number_is_an_input_error(metrics: object, kind: str):
    answer = {"loss_fn_output_type": "x", "loss_fn_outputs": [], "metrics": metrics}
    with pytest.raises(InputError, match="metrics"):
        read(answer, kind)


def test_a_408_may_say_what_the_queue_does():
    body = json.dumps({"queue_state": "paused_capacity", "queue_state_reason": "full"}).encode()
    assert decode_pending(body) == PendingResult("paused_capacity", "full")


def test_a_408_of_the_api_that_says_nothing_is_still_pending():
    assert decode_pending(b"{}") == PendingResult("unknown", None)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]"])
def test_a_408_that_the_api_did_not_write_says_nothing(body: bytes):
    assert decode_pending(body) is None
