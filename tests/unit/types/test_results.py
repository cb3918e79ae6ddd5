"""What training and sampling return."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from tinkex.errors import InputError, InputTypeError
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
    Usage,
)

OUTPUT = ForwardBackwardOutput(
    "ArrayRecord", [{"logprobs": TensorData([-1.0], "float32")}], {"loss:sum": 1.0}
)


@pytest.mark.req("S4")
def test_reading_the_loss_says_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r'metrics\["loss:sum"\]'):
        _ = OUTPUT.loss  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(OUTPUT, "loss")
    assert "loss" not in {field.name for field in dataclasses.fields(OUTPUT)}
    with pytest.raises(AttributeError, match="'lossy'"):
        _ = OUTPUT.lossy  # pyright: ignore[reportAttributeAccessIssue]


def test_outputs_compare_without_usage_and_pickle() -> None:
    twin = dataclasses.replace(OUTPUT, usage=Usage(trained_tokens=4))
    assert twin == OUTPUT
    assert pickle.loads(pickle.dumps(twin)).usage == Usage(trained_tokens=4)
    assert copy.deepcopy(OUTPUT) == OUTPUT
    with pytest.raises(AttributeError):
        OUTPUT.metrics = {}  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ((5, []), "ForwardBackwardOutput.loss_fn_output_type"),
        (("x", None), "ForwardBackwardOutput.loss_fn_outputs"),
        (("x", [{"a": [1]}]), "ForwardBackwardOutput.loss_fn_outputs[0]"),
        (("x", [5]), "ForwardBackwardOutput.loss_fn_outputs[0]"),
        (("x", [], []), "ForwardBackwardOutput.metrics"),
    ],
)
def test_bad_outputs_are_refused_and_named(fields: tuple[object, ...], path: str) -> None:
    with pytest.raises(InputTypeError) as caught:
        ForwardBackwardOutput(*fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == path


def test_batches_check_their_parts() -> None:
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})
    batch = ForwardBackwardInput([datum], "ppo", {"clip_low_threshold": 1, "loss_id": "L"})
    assert batch.loss_fn_config == {"clip_low_threshold": 1.0, "loss_id": "L"}
    assert ForwardBackwardRequest(batch, "m", 1) == ForwardBackwardRequest(batch, "m", 1)
    for fields, path in (
        (([datum], "pop"), "loss_fn"),
        (([datum], 5), "loss_fn"),
        (("x", "ppo"), "data"),
        (([datum, 5], "ppo"), "data[1]"),
        (([datum], "ppo", {"a": None}), 'loss_fn_config["a"]'),
        (([datum], "ppo", {"a": True}), 'loss_fn_config["a"]'),
        (([datum], "ppo", {"a": 10**400}), 'loss_fn_config["a"]'),
        (([datum], "ppo", {1: 1.0}), "loss_fn_config"),
        (([datum], "ppo", [1]), "loss_fn_config"),
    ):
        with pytest.raises(InputError) as caught:
            ForwardBackwardInput(*fields)  # pyright: ignore[reportArgumentType]
        assert caught.value.path == f"ForwardBackwardInput.{path}"
    for fields in ((None, "m"), (batch, 5), (batch, "m", True)):
        with pytest.raises(InputTypeError):
            ForwardRequest(*fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.req("B12")
def test_sequences_compare_and_give_real_lists() -> None:
    from_arrays = SampledSequence(
        "stop", "s", np.array([1, 2], np.int32), np.array([-0.5, -0.25], np.float32)
    )
    from_lists = SampledSequence("stop", "s", tokens=[1, 2], logprobs=[-0.5, -0.25])
    private = SampledSequence("stop", "s", _tokens_list=[1, 2], _logprobs_list=[-0.5, -0.25])
    assert from_arrays == from_lists == private
    assert from_arrays.tokens == [1, 2]
    assert type(from_arrays.tokens) is list
    assert type(from_arrays.tokens[0]) is int
    assert from_arrays.tokens is from_arrays.tokens
    assert from_arrays.logprobs == [-0.5, -0.25]
    assert from_arrays != SampledSequence("stop", "s", tokens=[1, 3], logprobs=[-0.5, -0.25])
    assert "2 tokens=[1, 2]" in repr(from_arrays)
    assert pickle.loads(pickle.dumps(from_arrays)) == from_arrays
    assert dataclasses.replace(from_arrays, sequence_id="t").sequence_id == "t"


def test_a_sequence_without_tokens_has_an_empty_list() -> None:
    empty = SampledSequence("length", "s")
    assert (empty.tokens, empty.logprobs, empty.topk_logprobs) == ([], None, None)
    with pytest.raises(AttributeError):
        empty.stop_reason = "stop"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stop_reason": "eos"}, "stop_reason"),
        ({"stop_reason": None}, "stop_reason"),
        ({"sequence_id": 5}, "sequence_id"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [2**31]}, "tokens"),
        ({"tokens": [[1]]}, "tokens"),
        ({"tokens": "x"}, "tokens"),
        ({"tokens": [1], "logprobs": [0.0, 0.0]}, "logprobs"),
        ({"logprobs": ["x"]}, "logprobs"),
        ({"topk_logprobs": [[1]]}, "topk_logprobs"),
        ({"topk_logprobs": 5}, "topk_logprobs"),
    ],
)
def test_bad_sequences_are_refused_and_named(fields: dict[str, object], path: str) -> None:
    with pytest.raises(InputError) as caught:
        SampledSequence(**{"stop_reason": "stop", "sequence_id": "s", **fields})  # pyright: ignore[reportArgumentType]
    assert caught.value.path == f"SampledSequence.{path}"


def test_prompt_log_probabilities_are_lists_when_asked_for() -> None:
    response = SampleResponse(
        [SampledSequence("stop", "s", tokens=[1])],
        np.array([np.nan, -1.0], np.float32),
        TopkLogprobs.from_lists([None, [(3, -1.0)]]),
    )
    assert response.prompt_logprobs == [None, -1.0]
    assert response.topk_prompt_logprobs == [None, [(3, -1.0)]]
    assert SampleResponse([]).prompt_logprobs is None
    from_lists = SampleResponse(
        response.sequences,
        _prompt_logprobs_list=[None, -1.0],
        _topk_prompt_logprobs_list=[None, [(3, -1.0)]],
        usage=Usage(prompt_tokens=2),
    )
    assert from_lists == response
    assert pickle.loads(pickle.dumps(from_lists)) == response
    assert response != SampleResponse([])


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sequences": None}, "sequences"),
        ({"sequences": [5]}, "sequences[0]"),
        ({"prompt_logprobs_np": "x"}, "prompt_logprobs_np"),
        ({"prompt_cache_hit_tokens": "1"}, "prompt_cache_hit_tokens"),
        ({"target_prompt_logprobs": [1]}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens": 1}, "prompt_alt_tokens"),
        ({"topk_prompt_logprobs_np": 5}, "topk_prompt_logprobs_np"),
    ],
)
def test_bad_sample_responses_are_refused_and_named(fields: dict[str, object], path: str) -> None:
    with pytest.raises(InputError) as caught:
        SampleResponse(**{"sequences": [], **fields})  # pyright: ignore[reportArgumentType]
    assert caught.value.path == f"SampleResponse.{path}"
