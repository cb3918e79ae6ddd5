import base64
import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire import bodies
from tinkex.wire.json_codec import decode, encode


def sample_request(**changes: object) -> types.SampleRequest:
    fields: dict[str, object] = {
        "prompt": types.ModelInput.from_ints([1, 2]),
        "sampling_params": types.SamplingParams(),
        **changes,
    }
    return types.SampleRequest(**fields)


def written(obj: object) -> object:
    return json.loads(encode(obj))


@pytest.mark.req("S6")
def test_unset_members_are_left_out_and_defaults_are_written_at_every_level():
    assert written(sample_request()) == {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }


@pytest.mark.req("S7")
@pytest.mark.parametrize("value", [True, False])
def test_prompt_logprobs_is_written_only_when_set(value: bool):
    assert written(sample_request(prompt_logprobs=value))["prompt_logprobs"] is value
    assert "prompt_logprobs" not in written(sample_request(prompt_logprobs=None))


@pytest.mark.req("S6")
def test_the_empty_stop_list_is_not_the_absent_one():
    never = sample_request(sampling_params=types.SamplingParams(stop=[]))
    assert written(never)["sampling_params"]["stop"] == []
    assert "stop" not in written(sample_request())["sampling_params"]


@pytest.mark.req("S6")
def test_nulls_in_free_form_maps_stay():
    request = types.CreateSessionRequest(
        tags=[], user_metadata={"a": None, "b": {"c": [None]}}, sdk_version="1"
    )
    assert written(request)["user_metadata"] == {"a": None, "b": {"c": [None]}}


@pytest.mark.req("S6")
def test_nulls_in_custom_loss_arguments_stay():
    node = types.CustomLossNode(
        op="call_function", name="n", target="torch.sum", args=[None], kwargs={"dim": None}
    )
    assert written(node)["args"] == [None]
    assert written(node)["kwargs"] == {"dim": None}


@pytest.mark.req("S6")
def test_the_two_bodies_that_mean_something_with_a_null_send_it():
    finish = bodies.FinishSessionRequest(reason=types.ClientSessionFinishSuccess())
    assert written(finish) == {"reason": {"type": "success"}, "detail": None}
    assert written(bodies.SetTtlRequest(ttl_seconds=None)) == {"ttl_seconds": None}
    assert written(bodies.SetTtlRequest(ttl_seconds=3600)) == {"ttl_seconds": 3600}


def test_adam_parameters_have_a_member_of_their_own():
    step = types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m", seq_id=4)
    assert written(step) == {
        "model_id": "m",
        "seq_id": 4,
        "type": "optim_step",
        "adam_params": {
            "learning_rate": 0.0001,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        },
    }


def test_other_optimizers_share_a_member():
    step = types.OptimStepRequest(
        optim_params=types.DimuonParams(learning_rate=0.1), model_id="m", seq_id=4
    )
    assert written(step)["optimizer_params"] == {
        "type": "dimuon",
        "learning_rate": 0.1,
        "grad_clip_norm": 0.0,
        "beta1": 0.9,
    }
    assert "adam_params" not in written(step)


def test_an_unknown_optimizer_family_passes_through_both_ways():
    body = b'{"base_model":"b","is_lora":true,"optimizer_config":{"type":"new","x":[1,null]}}'
    info = decode(types.WeightsInfoResponse, body)
    assert written(info)["optimizer_config"] == {"type": "new", "x": [1, None]}


@pytest.mark.req("S8")
def test_pictures_are_base64_in_json():
    picture = bytes(range(256))
    chunk = types.ImageChunk(data=picture, format="png", expected_tokens=7)
    assert written(chunk) == {
        "type": "image",
        "data": base64.b64encode(picture).decode(),
        "format": "png",
        "expected_tokens": 7,
    }
    assert decode(types.ImageChunk, encode(chunk)) == chunk


@pytest.mark.req("S8")
def test_picture_pointers_carry_their_location():
    chunk = types.ImageAssetPointerChunk(format="jpeg", location="s3://b/k")
    assert written(chunk) == {
        "type": "image_asset_pointer",
        "format": "jpeg",
        "location": "s3://b/k",
    }


def test_tensors_are_flat_numbers_with_a_shape():
    dense = types.TensorData([[1, -1], [2, 3]], "int64", [2, 2])
    request = sample_request(target_prompt_logprobs=dense)
    assert written(request)["target_prompt_logprobs"] == {
        "data": [1, -1, 2, 3],
        "dtype": "int64",
        "shape": [2, 2],
    }
    assert decode(types.SampleRequest, encode(request)) == request


def test_sparse_tensors_name_their_indices():
    sparse = types.TensorData([5], "int64", [2, 3], [0, 0, 1], [2])
    request = sample_request(target_prompt_logprobs=sparse)
    assert written(request)["target_prompt_logprobs"] == {
        "data": [5],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [2],
    }
    assert decode(types.SampleRequest, encode(request)) == request


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tensors_with_numbers_json_does_not_have_are_refused(value: float):
    tensor = types.TensorData(np.array([1.0, value], "f4"), "float32")
    with pytest.raises(InputError, match="cannot be sent as JSON"):
        encode(tensor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_text_ever_holds_a_number_json_does_not_have(value: float):
    def refuse(name: str) -> None:
        raise AssertionError(name)

    for body in (
        types.OptimStepResponse(metrics={"grad_norm": value}),
        types.CreateSessionRequest(tags=[], user_metadata={"x": [value]}, sdk_version="1"),
        {"free": value},
    ):
        json.loads(encode(body), parse_constant=refuse)


def test_a_metric_that_is_not_finite_travels_by_name():
    response = types.OptimStepResponse(
        metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}
    )
    assert written(response) == {
        "metrics": {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5}
    }


def test_what_a_result_cost_never_travels():
    response = types.OptimStepResponse(metrics={}, usage=types.Usage(trained_tokens=3))
    assert written(response) == {"metrics": {}}


def test_times_are_rfc_3339():
    cursor = types.SessionSearchCursor(
        last_created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), last_session_id="s"
    )
    assert written(cursor)["last_created_at"] == "2026-01-02T03:04:05Z"
    assert decode(types.SessionSearchCursor, encode(cursor)) == cursor


@pytest.mark.req("S9")
@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (
            types.SampleRequest,
            {"prompt": {"chunks": [{"type": "hologram"}]}, "sampling_params": {}},
            "prompt.chunks[0].type",
        ),
        (
            types.FuturesRetrieveResponse,
            {"completions": [{"state": "lost", "request_id": "r"}], "cursor": 1},
            "completions[0].state",
        ),
        (
            types.SessionSearchResponse,
            {
                "sessions": [
                    {
                        "session_id": "s",
                        "created_at": "2026-01-02T03:04:05Z",
                        "owner": "o",
                        "project_id": "p",
                        "checkpoints_count": 0,
                        "status": {"type": "sleeping"},
                    }
                ]
            },
            "sessions[0].status.type",
        ),
    ],
    ids=["chunk", "future", "status"],
)
def test_an_unknown_tag_is_an_error_that_names_its_path(kind: type, body: object, path: str):
    with pytest.raises(InputError) as caught:
        decode(kind, json.dumps(body))
    assert caught.value.path == path


@pytest.mark.req("S9")
def test_unions_decode_into_the_class_of_their_tag():
    chunks = [
        types.EncodedTextChunk(tokens=[1]),
        types.ImageChunk(data=b"x", format="png"),
        types.ImageAssetPointerChunk(format="png", location="l"),
        types.DmelChunk(dmel=b"y"),
    ]
    decoded = decode(types.ModelInput, encode(types.ModelInput(chunks=chunks)))
    assert [type(chunk) for chunk in decoded.chunks] == [type(chunk) for chunk in chunks]
    assert decoded.chunks == chunks


@pytest.mark.req("S9")
def test_unknown_members_of_a_reply_are_skipped():
    reply = decode(types.UntypedAPIFuture, b'{"request_id":"r","novelty":{"a":[1]}}')
    assert reply == types.UntypedAPIFuture(request_id="r")


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (types.UntypedAPIFuture, b'{"request_id":1}', "request_id"),
        (types.UntypedAPIFuture, b"{}", ""),
        (types.UntypedAPIFuture, b"[]", ""),
        (types.UntypedAPIFuture, b'{"request_id":"r","model_id":1}', "model_id"),
        (types.Checkpoint, b'{"checkpoint_id":"c","checkpoint_type":"odd"}', "checkpoint_type"),
        (types.ClientConfigResponse, b'{"parallel_fwdbwd_chunks":null}', "parallel_fwdbwd_chunks"),
        (types.ClientConfigResponse, b'{"fwdbwd_max_chunk_len":"5"}', "fwdbwd_max_chunk_len"),
        (types.JoinSamplingSessionResponse, b'{"client_counter":true}', "client_counter"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_an_error_that_names_its_path(kind: type, body: bytes, path: str):
    with pytest.raises(InputError) as caught:
        decode(kind, body)
    assert caught.value.path == path


def test_a_bad_tensor_is_an_error_that_names_its_path():
    body = {
        "prompt": {"chunks": []},
        "sampling_params": {},
        "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [3]},
    }
    with pytest.raises(InputError) as caught:
        decode(types.SampleRequest, json.dumps(body))
    assert caught.value.path == "target_prompt_logprobs.shape"


@pytest.mark.parametrize(
    "tensor",
    [
        {"data": [1], "dtype": "int64", "shape": [2**40, 2**40]},
        {"data": [], "dtype": "int64", "shape": [-1]},
        {"data": [1e400], "dtype": "float32"},
        {"data": ["1"], "dtype": "int64"},
        {"data": [2**70], "dtype": "int64"},
        {"data": [1], "dtype": "int64", "shape": [1, 2**40], "sparse_crow_indices": [0, 1],
         "sparse_col_indices": [0]},
        {"data": [1], "dtype": "float16"},
        {"data": {}, "dtype": "int64"},
        [],
        "x",
    ],
)  # fmt: skip
def test_a_hostile_tensor_is_an_input_error(tensor: object):
    body = json.dumps(
        {"prompt": {"chunks": []}, "sampling_params": {}, "target_prompt_logprobs": tensor}
    )
    with pytest.raises(InputError):
        decode(types.SampleRequest, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"metrics":{"a":NaN}}',
        b'{"metrics":{"a":Infinity}}',
        b'{"metrics":{"a":-Infinity}}',
        b'{"metrics":{"a":1e999}}',
        b'{"metrics":"\xff"}',
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_text_that_is_not_json_is_an_input_error(body: bytes):
    with pytest.raises(InputError):
        decode(types.OptimStepResponse, body)


@pytest.mark.req("S12")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, "user_metadata.a[1].b"),
        ({"a": "\ud800"}, "user_metadata.a"),
        ({"a": np.float32(1)}, "user_metadata.a"),
        ({"a": {(1, 2): 3}}, "user_metadata.a"),
    ],
)
def test_a_value_without_a_json_form_is_an_error_that_names_its_path(value: dict, path: str):
    request = types.CreateSessionRequest(tags=[], user_metadata=value, sdk_version="1")
    with pytest.raises(InputError, match="cannot be written as JSON") as caught:
        encode(request)
    assert caught.value.path == path


@pytest.mark.req("S12")
def test_the_path_is_also_found_in_a_body_without_optional_members():
    event = types.GenericEvent(
        event_id="e",
        event_name="n",
        event_session_index=0,
        severity="INFO",
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        event_data={"a": [object()]},
    )
    with pytest.raises(InputError) as caught:
        encode([event])
    assert caught.value.path == "[0].event_data.a[0]"


def test_a_map_that_contains_itself_is_an_input_error():
    loop: dict[str, object] = {}
    loop["again"] = loop
    with pytest.raises(InputError):
        encode({"x": loop})
