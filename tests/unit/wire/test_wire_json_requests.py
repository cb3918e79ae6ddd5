"""What clients from 0.2 to 0.24 send."""

import json

import pytest

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire import bodies
from tinkex.wire.json_requests import decode_request, decode_training_request


def test_members_left_out_have_their_defaults():
    body = {"model_id": "m", "seq_id": 2, "adam_params": {"learning_rate": 0.5}}
    request = decode_request(types.OptimStepRequest, json.dumps(body))
    assert request.optim_params == types.AdamParams(learning_rate=0.5)


def test_a_null_member_is_an_absent_one():
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 5, "seed": None, "stop": None, "temperature": None},
        "base_model": None,
        "num_samples": None,
        "prompt_logprobs": None,
    }
    assert decode_request(types.SampleRequest, json.dumps(body)) == types.SampleRequest(
        prompt=types.ModelInput.from_ints([1]),
        sampling_params=types.SamplingParams(max_tokens=5),
    )


def test_a_member_that_may_be_null_may_be_absent():
    request = decode_request(types.CreateSessionRequest, b'{"tags":[],"sdk_version":"1"}')
    assert request.user_metadata is None


def test_nulls_in_free_form_maps_stay_when_others_are_dropped():
    body = {
        "tags": [],
        "sdk_version": "0.9.0",
        "project_id": None,
        "type": None,
        "user_metadata": {"a": None, "b": [{"c": None}]},
    }
    request = decode_request(types.CreateSessionRequest, json.dumps(body))
    assert request.user_metadata == {"a": None, "b": [{"c": None}]}
    assert request.type == "create_session"


def test_a_null_that_means_something_is_kept_when_others_are_dropped():
    body = json.dumps({"ttl_seconds": None})
    assert decode_request(bodies.SetTtlRequest, body).ttl_seconds is None
    with pytest.raises(InputError, match="ttl_seconds"):
        decode_request(bodies.SetTtlRequest, "{}")


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"tokens": [1, 2]}, types.EncodedTextChunk(tokens=[1, 2])),
        ({"tokens": [1], "type": None}, types.EncodedTextChunk(tokens=[1])),
        (
            {"data": "eA==", "format": "png", "height": 3, "width": 4, "tokens": 9},
            types.ImageChunk(data=b"x", format="png"),
        ),
        (
            {"location": "l", "format": "jpeg", "expected_tokens": None},
            types.ImageAssetPointerChunk(location="l", format="jpeg"),
        ),
        ({"dmel": "eA=="}, types.DmelChunk(dmel=b"x")),
    ],
)
def test_a_chunk_without_a_kind_is_recognised_by_its_members(chunk: dict, expected: object):
    body = {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 1}}
    request = decode_request(types.SampleRequest, json.dumps(body))
    assert request.prompt.chunks == [expected]


@pytest.mark.parametrize(
    ("chunk", "path"),
    [
        ({"type": "hologram", "tokens": [1]}, "prompt.chunks[1].type"),
        ({"colour": 3}, "prompt.chunks[1]"),
        ({}, "prompt.chunks[1]"),
        ({"tokens": ["1"]}, "prompt.chunks[1].tokens[0]"),
        ({"tokens": [-1]}, "prompt.chunks[1].tokens[0]"),
        ({"data": "!", "format": "png"}, "prompt.chunks[1].data"),
        ([], "prompt.chunks[1]"),
        (None, "prompt.chunks[1]"),
    ],
)
@pytest.mark.req("S9")
def test_a_chunk_nobody_can_recognise_is_an_error_that_names_its_path(chunk: object, path: str):
    body = {"prompt": {"chunks": [{"tokens": [1]}, chunk]}, "sampling_params": {}}
    with pytest.raises(InputError) as caught:
        decode_request(types.SampleRequest, json.dumps(body))
    assert caught.value.path == path


def test_unknown_members_are_skipped():
    request = decode_request(types.GetInfoRequest, b'{"model_id":"m","later":1}')
    assert request == types.GetInfoRequest(model_id="m")


def batch(**changes: object) -> dict[str, object]:
    return {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [0, 1, 1], "dtype": "float32", "shape": None},
                },
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
        **changes,
    }


def test_a_json_training_request_is_read():
    body = {"forward_backward_input": batch(), "model_id": "m", "seq_id": 1, "type": None}
    decoded = decode_training_request(json.dumps(body))
    assert (decoded.model_id, decoded.seq_id, decoded.loss_fn) == ("m", 1, "cross_entropy")
    assert decoded.forward_only is False
    assert decoded.loss_fn_config == {}
    assert decoded.data == [
        types.Datum(
            types.ModelInput.from_ints([1, 2, 3]),
            {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]},
        )
    ]


def test_a_json_forward_request_is_read_without_sequence_number():
    body = {"forward_input": batch(loss_fn_config={"beta": 1}), "model_id": "m"}
    decoded = decode_training_request(json.dumps(body), forward_only=True)
    assert decoded.forward_only is True
    assert decoded.seq_id is None
    assert decoded.loss_fn_config == {"beta": 1}


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ([{"model_input": {"chunks": []}}], "forward_backward_input.data[0]"),
        ([3], "forward_backward_input.data[0]"),
        (
            [
                {
                    "model_input": {"chunks": []},
                    "loss_fn_inputs": {"a": {"data": [1], "dtype": "int8"}},
                }
            ],
            "forward_backward_input.data[0].loss_fn_inputs[...].dtype",
        ),
        (
            [
                {
                    "model_input": {"chunks": []},
                    "loss_fn_inputs": {"target_tokens": {"data": [1.5], "dtype": "float32"}},
                }
            ],
            'forward_backward_input.data[0].loss_fn_inputs["target_tokens"]',
        ),
    ],
)
def test_a_bad_json_training_request_names_the_path(data: object, path: str):
    body = {"forward_backward_input": batch(data=data), "model_id": "m", "seq_id": 1}
    with pytest.raises(InputError) as caught:
        decode_training_request(json.dumps(body))
    assert caught.value.path == path


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b"{", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_an_input_error(body: bytes):
    with pytest.raises(InputError):
        decode_request(types.SampleRequest, body)
    with pytest.raises(InputError):
        decode_training_request(body)
