"""Data checks before sending (B14), and what they must let through."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.errors import InputError
from tinkex.types import Datum, ForwardBackwardInput, ImageChunk, ModelInput, TensorData
from tinkex.types.training import batch_to_send, check_datum

THREE = ModelInput.from_ints([1, 2, 3])
RL = {"target_tokens": [2, 3, 4], "logprobs": [-0.5] * 3, "advantages": [1.0] * 3}


def datum(**inputs: object) -> Datum:
    return Datum(THREE, inputs)


def objects(items: list[Datum]) -> Any:
    """An array that holds Python objects."""
    array = np.empty(len(items), object)
    array[:] = items
    return array


@pytest.mark.req("B14")
@pytest.mark.parametrize(
    ("inputs", "loss_fn", "key", "text"),
    [
        ({}, "cross_entropy", "target_tokens", "needs it"),
        ({"target_tokens": [2, 3, 4]}, "ppo", "logprobs", "needs it"),
        ({**RL, "advantages": [1.0]}, "importance_sampling", "advantages", "1 positions .* 3"),
        ({"target_tokens": [2, 3]}, "cross_entropy", "target_tokens", "2 positions .* 3"),
        ({"target_tokens": [2, 3, 4], "weights": [1.0]}, "cross_entropy", "weights", "positions"),
        (
            {"target_tokens": [[2, 3]] * 3, "weights": [1.0] * 3},
            "cross_entropy",
            "weights",
            r"shape \[3\] but target_tokens has \[3, 2\]",
        ),
        ({"target_tokens": []}, "cross_entropy", "target_tokens", "0 positions"),
        ({"target_tokens": [2, 3, -100]}, "cross_entropy", "target_tokens", "weight 0"),
        ({"target_tokens": [2, 3, 2**31]}, "cross_entropy", "target_tokens", "outside 32 bits"),
        ({"target_tokens": [2, 3, 50]}, "cross_entropy", "target_tokens", "vocabulary of 50"),
        (
            {"target_tokens": [2, 3, 4], "weights": [1, float("nan"), 1]},
            "cross_entropy",
            "weights",
            "nan at position 1",
        ),
        ({**RL, "advantages": [1, 1, float("inf")]}, "cispo", "advantages", "inf at position 2"),
        ({**RL, "logprobs": [-1, float("-inf"), 0]}, "gspo", "logprobs", "finite"),
    ],
)
def test_bad_data_is_refused_with_its_place_and_the_fix(
    inputs: dict[str, object], loss_fn: str, key: str, text: str
) -> None:
    vocab_size = 50 if "vocabulary" in text else None
    with pytest.raises(InputError, match=text) as caught:
        check_datum(datum(**inputs), 3, loss_fn, vocab_size)
    assert caught.value.path == f'data[3].loss_fn_inputs["{key}"]'


@pytest.mark.req("B14")
@pytest.mark.parametrize(
    ("tensor", "passes"),
    [
        (np.array(1.5, "f4"), True),
        (np.array(np.nan, "f4"), False),
        (np.zeros((0, 2), "f4"), True),
        (np.array([[1, 2], [3, np.inf]], "f4"), False),
    ],
)
def test_every_shape_is_looked_through_for_numbers_that_are_not_finite(
    tensor: np.ndarray, passes: bool
) -> None:
    one = datum(clip_low_threshold=TensorData(tensor, "float32", list(tensor.shape)))
    if passes:
        check_datum(one, 0, "custom")
    else:
        with pytest.raises(InputError, match="finite"):
            check_datum(one, 0, "custom")


@pytest.mark.req("B14")
def test_input_ids_are_compared_with_the_vocabulary() -> None:
    with pytest.raises(InputError, match="another model's tokenizer") as caught:
        check_datum(datum(target_tokens=[0, 0, 0]), 0, "cross_entropy", vocab_size=3)
    assert caught.value.path == "data[0].model_input.chunks[0].tokens[2]"


@pytest.mark.req("B14")
def test_empty_input_and_empty_batch_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        check_datum(Datum(ModelInput.empty(), {"target_tokens": []}), 1, "cross_entropy")
    assert caught.value.path == "data[1].model_input"
    for bad in ([], (), None, "x", b"x", {}, {1}, 5, ModelInput.empty(), iter(())):
        with pytest.raises(InputError) as caught:
            batch_to_send(bad, "cross_entropy")
        assert caught.value.path == "data"


@pytest.mark.parametrize("collected", [list, tuple, iter, deque, objects])
def test_a_batch_may_come_in_any_ordered_collection(collected: Callable[[Any], Any]) -> None:
    given = [datum(target_tokens=[1, 2, 3]), datum(target_tokens=[4, 5, 6])]
    sent = batch_to_send(collected(given), "cross_entropy")
    assert [one.loss_fn_inputs for one in sent] == [one.loss_fn_inputs for one in given]
    batch = ForwardBackwardInput(collected(given), "cross_entropy")
    assert batch.data == given


@pytest.mark.req("B14")
def test_what_is_no_datum_or_no_tensor_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        batch_to_send([datum(target_tokens=[1, 2, 3]), "x"], "cross_entropy")
    assert caught.value.path == "data[1]"
    tampered = datum(target_tokens=[1, 2, 3])
    tampered.loss_fn_inputs["weights"] = [1, 2, 3]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError) as caught:
        check_datum(tampered, 0, "cross_entropy")
    assert caught.value.path == 'data[0].loss_fn_inputs["weights"]'
    tampered.loss_fn_inputs["weights"] = TensorData([1, 2, 3], "int64")
    with pytest.raises(InputError, match="expected float32"):
        check_datum(tampered, 0, "cross_entropy")


@pytest.mark.req("S3")
def test_unknown_losses_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="cross_entropy, importance_sampling") as caught:
        batch_to_send([datum(target_tokens=[1, 2, 3])], "crossentropy")
    assert caught.value.path == "loss_fn"


@pytest.mark.req("B14")
@pytest.mark.parametrize(
    ("inputs", "loss_fn"),
    [
        ({"target_tokens": [2, 3, 4]}, "cross_entropy"),
        ({"target_tokens": [2, 3, 4], "weights": [-1.0, 0.0, 2.0]}, "cross_entropy"),
        ({"target_tokens": [2, 3, 4], "weights": [0.0] * 3}, "cross_entropy"),
        ({"target_tokens": [[2, 3]] * 3, "weights": [[0.5, 0.5]] * 3}, "cross_entropy"),
        (
            {"target_tokens": torch.zeros(3, 9).long(), "weights": torch.zeros(3, 9)},
            "cross_entropy",
        ),
        ({"target_tokens": torch.zeros(3, 9).long(), "weights": np.ones((3, 9))}, "cross_entropy"),
        ({**RL, "mask": [1, 0, 1], "anything": [float("nan")]}, "ppo"),
        ({**RL, "clip_low_threshold": [0.8] * 3, "clip_high_threshold": [1.2]}, "ppo"),
        ({**RL, "sequence_ratio_mask": [1.0, 1.0, 0.0]}, "gspo"),
        (RL, "gspo"),
        (RL, "dro"),
        ({}, "stable_reinforce"),
        ({"reward": [1.0], "target_tokens": [1]}, "custom"),
    ],
    ids=str,
)
def test_what_the_protocol_allows_passes(inputs: dict[str, object], loss_fn: str) -> None:
    batch_to_send([datum(**inputs)], loss_fn, vocab_size=50)


def test_images_of_unknown_length_leave_the_length_to_the_server() -> None:
    picture = ModelInput.from_ints([1, 2]).append(ImageChunk(data=b"x", format="png"))
    batch_to_send([Datum(picture, {"target_tokens": [1, 2, 3, 4, 5]})], "cross_entropy")
    known = ModelInput.from_ints([1, 2]).append(
        ImageChunk(data=b"x", format="png", expected_tokens=2)
    )
    with pytest.raises(InputError, match=r"5 positions .* 4"):
        batch_to_send([Datum(known, {"target_tokens": [1, 2, 3, 4, 5]})], "cross_entropy")
