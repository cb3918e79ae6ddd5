"""Private copies: what a caller changes after a call is not what is sent."""

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.errors import InputError, InputTypeError
from tinkex.types.datum import copy_datum
from tinkex.types.sampling import copy_request
from tinkex.types.training import batch_to_send
from tinkex.wire import json_codec
from tinkex.wire.proto_training import encode_forward_backward


def private(tensor: types.TensorData) -> types.TensorData:
    return tensor._copy()  # pyright: ignore[reportPrivateUsage]


def body(datum: types.Datum) -> bytes:
    return encode_forward_backward(model_id="m", seq_id=1, data=[datum], loss_fn="cross_entropy")


def datum(weights: Any = (1.0, 1.0, 1.0)) -> types.Datum:
    spans = [types.SampledProvenanceSpan(sequence_id="s", length=3)]
    return types.Datum(
        types.ModelInput.from_ints([1, 2, 3]).append(
            types.ImageChunk(data=b"png", format="png", expected_tokens=2)
        ),
        {"target_tokens": [2, 3, 4], "weights": weights},
        spans,
        list(spans),
    )


def tokens_of(value: types.ModelInput) -> list[int]:
    return cast("list[int]", cast("types.EncodedTextChunk", value.chunks[0]).tokens)


CHANGES: dict[str, Callable[[types.Datum], object]] = {
    "a token": lambda d: tokens_of(d.model_input).append(9),
    "a token that is none": lambda d: tokens_of(d.model_input).append(cast("int", "x")),
    "a chunk": lambda d: d.model_input.chunks.clear(),
    "an input": lambda d: d.loss_fn_inputs.pop("weights"),
    "an element": lambda d: d.loss_fn_inputs["weights"].to_numpy().fill(7),
    "a shape in place": lambda d: setattr(d.loss_fn_inputs["weights"].to_numpy(), "shape", (3, 1)),
    "a span": lambda d: cast("list[Any]", d.model_input_spans).clear(),
}


@pytest.mark.req("S12")
@pytest.mark.filterwarnings("ignore:Setting the shape")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_copied_datum_is_sent_as_it_was_when_it_was_copied(
    change: Callable[[types.Datum], object],
) -> None:
    given = datum()
    kept = copy_datum(given, "data[0]")
    before = body(kept)
    assert before == body(datum())
    change(given)
    assert body(kept) == before


@pytest.mark.req("S12")
@pytest.mark.parametrize(
    "weights",
    [np.ones(3, np.float32), torch.ones(3), np.ones((3, 2), np.float32)[:, 0]],
    ids=["numpy", "torch", "strided"],
)
def test_a_buffer_can_be_filled_again_after_the_datum_was_copied(weights: Any) -> None:
    kept = copy_datum(datum(weights), "data[0]")
    weights[:] = 5.0
    assert kept.loss_fn_inputs["weights"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.req("S2")
def test_memory_that_nobody_can_write_to_is_not_copied() -> None:
    array = np.frombuffer(np.ones(4, np.float32).tobytes(), np.float32)
    for given in (array, array.reshape(2, 2)):
        assert np.shares_memory(private(types.TensorData.from_numpy(given)).to_numpy(), array)
    behind = np.ones(4, np.float32)
    view = behind.view()
    view.flags.writeable = False
    assert not np.shares_memory(private(types.TensorData.from_numpy(view)).to_numpy(), behind)


@pytest.mark.req("S2")
@pytest.mark.parametrize(
    "tensor",
    [
        types.TensorData([1.0, 2.0], "float32"),
        types.TensorData([1.0, 2.0], "float32", [2]),
        types.TensorData.from_numpy(np.array([1.0, 2.0], np.float64)),
        datum([1.0, 2.0, 3.0]).loss_fn_inputs["weights"],
    ],
    ids=["list", "shape", "cast", "datum"],
)
def test_memory_of_our_own_is_copied_only_when_somebody_asks_for_it(
    tensor: types.TensorData,
) -> None:
    first, second = private(tensor), private(tensor)
    assert first._numpy is second._numpy is tensor._numpy  # pyright: ignore[reportPrivateUsage]
    tensor.to_numpy()[0] = 9
    copy.copy(second).to_numpy()[0] = 8
    assert (tensor.data[0], first.data[0]) == (9, 1)
    third = private(tensor)
    tensor.to_numpy()[0] = 7
    assert third.data[0] == 9


def test_sparse_tensors_are_copied_and_checked_again() -> None:
    col = np.array([2])
    tensor = types.TensorData([1], "int64", [2, 3], [0, 0, 1], col)  # pyright: ignore[reportArgumentType]
    kept = private(tensor)
    col[0] = 9
    assert kept.sparse_col_indices == [2]
    with pytest.raises(InputError) as caught:
        copy_datum(types.Datum(types.ModelInput.from_ints([1, 2]), {"weights": tensor}), "data[4]")
    assert caught.value.path == 'data[4].loss_fn_inputs["weights"].sparse_col_indices'


@pytest.mark.req("B14")
@pytest.mark.parametrize("bad", ["x", -1, 2**31, 2**40, 1.5, None])
def test_tokens_that_became_bad_are_named_before_anything_is_sent(bad: Any) -> None:
    given = datum()
    tokens_of(given.model_input)[1] = bad
    with pytest.raises(InputError) as caught:
        copy_datum(given, "data[7]")
    assert caught.value.path == "data[7].model_input.chunks[0].tokens[1]"


@pytest.mark.req("B14")
def test_what_became_of_lists_and_dicts_is_checked_too() -> None:
    given = datum()
    given.model_input.chunks.append(cast("Any", "text"))
    with pytest.raises(InputTypeError) as caught:
        copy_datum(given, "data[0]")
    assert caught.value.path == "data[0].model_input.chunks[2]"
    given = datum()
    cast("list[Any]", given.model_input_spans).append("span")
    with pytest.raises(InputTypeError) as caught:
        copy_datum(given, "data[0]")
    assert caught.value.path == "data[0].model_input_spans[1]"
    for key, value, path in (
        ("weights", [1.0], 'data[0].loss_fn_inputs["weights"]'),
        (5, types.TensorData([1], "int64"), "data[0].loss_fn_inputs"),
    ):
        given = datum()
        given.loss_fn_inputs[cast("str", key)] = cast("types.TensorData", value)
        with pytest.raises(InputTypeError) as caught:
            batch_to_send([given], "cross_entropy")
        assert caught.value.path == path


def test_the_shape_of_a_tensor_cannot_be_changed() -> None:
    tensor = types.TensorData([1, 2], "int64", [2])
    cast("list[int]", tensor.shape).append(5)
    assert tensor.shape == [2]


@pytest.mark.req("S12")
def test_a_copied_sample_request_keeps_prompt_stops_and_targets() -> None:
    targets = np.array([[5], [6]])
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        sampling_params=types.SamplingParams(stop=["a"]),
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
    )
    before = json_codec.encode(request)
    kept = copy_request(request)
    tokens_of(request.prompt).clear()
    cast("list[str]", request.sampling_params.stop).append("b")
    targets[0, 0] = 9
    assert json_codec.encode(kept) == before
