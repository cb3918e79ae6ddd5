"""Datums and their provenance."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.errors import InputError, InputTypeError
from tinkex.types import Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan, TensorData

THREE = ModelInput.from_ints([1, 2, 3])


@pytest.mark.req("B12")
@pytest.mark.parametrize(
    "weights",
    [
        [1, 0, 1],
        (1.0, 0.0, 1.0),
        np.array([1, 0, 1]),
        np.array([True, False, True]),
        torch.tensor([1, 0, 1]),
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True),
        TensorData([1, 0, 1], "int64"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_known_keys_have_one_dtype_whatever_the_container(weights: object) -> None:
    tensor = Datum(THREE, {"weights": weights}).loss_fn_inputs["weights"]
    assert tensor.dtype == "float32"
    assert tensor.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.req("B12")
def test_unknown_keys_keep_their_own_dtype() -> None:
    inputs = Datum(
        THREE,
        {"mask": [1, 0, 1], "alpha": [0.5], "beta": np.ones(1), "gamma": torch.ones(1).long()},
    ).loss_fn_inputs
    assert {key: tensor.dtype for key, tensor in inputs.items()} == {
        "mask": "int64",
        "alpha": "float32",
        "beta": "float32",
        "gamma": "int64",
    }


@pytest.mark.req("B12")
def test_equal_datums_are_equal_and_print_their_data() -> None:
    left = Datum(THREE, {"weights": [1.0, 0.0, float("nan")], "target_tokens": [2, 3, 4]})
    right = Datum(
        ModelInput.from_ints((1, 2, 3)),
        {"weights": np.array([1, 0, np.nan]), "target_tokens": torch.tensor([2, 3, 4])},
    )
    assert left == right
    assert left != Datum(THREE, {"weights": [1.0, 0.0, 0.0], "target_tokens": [2, 3, 4]})
    assert "data=[2, 3, 4]" in repr(left)
    assert pickle.loads(pickle.dumps(left)) == left
    assert dataclasses.replace(left) == left


def test_the_callers_dict_is_left_alone() -> None:
    given = {"weights": [1, 1, 1]}
    Datum(THREE, given)
    assert given == {"weights": [1, 1, 1]}


@pytest.mark.req("S2")
@pytest.mark.parametrize(
    "value",
    [
        1.0,
        np.float32(1),
        torch.tensor(1.0),
        None,
        "abc",
        {"a": 1},
        THREE,
        ["a"],
        [[1], [1, 2]],
        [object()],
        np.zeros(3, "complex64"),
        [1e300],
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_loss_inputs_are_refused_and_named(value: object) -> None:
    with pytest.raises(InputError) as caught:
        Datum(THREE, {"weights": value})
    assert caught.value.path == 'loss_fn_inputs["weights"]'


def test_fractional_targets_are_refused() -> None:
    with pytest.raises(InputError, match="position 1") as caught:
        Datum(THREE, {"target_tokens": [1, 2.5, 3]})
    assert caught.value.path == 'loss_fn_inputs["target_tokens"]'


@pytest.mark.parametrize("bad", [None, [1, 2], "x", 5])
def test_the_input_must_be_a_model_input(bad: object) -> None:
    with pytest.raises(InputTypeError) as caught:
        Datum(bad)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "Datum.model_input"


@pytest.mark.parametrize("bad", [None, [1, 2], {1: [1]}])
def test_loss_inputs_must_be_a_dict_with_names(bad: object) -> None:
    with pytest.raises(InputTypeError) as caught:
        Datum(THREE, bad)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "Datum.loss_fn_inputs"


def test_only_torch_matrices_of_targets_and_weights_become_sparse() -> None:
    matrix = torch.zeros(3, 8)
    inputs = Datum(
        THREE,
        {"weights": matrix, "target_tokens": matrix.long(), "advantages": matrix, "mask": matrix},
    ).loss_fn_inputs
    assert [key for key, value in inputs.items() if value.sparse_crow_indices] == [
        "weights",
        "target_tokens",
    ]
    dense = Datum(THREE, {"weights": matrix.numpy()}).loss_fn_inputs["weights"]
    assert dense.sparse_crow_indices is None


def span(length: int) -> SampledProvenanceSpan:
    return SampledProvenanceSpan(sequence_id="s", length=length)


def test_provenance_must_cover_input_and_targets() -> None:
    datum = Datum(THREE, {"target_tokens": [2, 3, 4]})
    prompt = PromptProvenanceSpan(sequence_id="s", length=1)
    made = datum.with_provenance([prompt, span(2)], (span(3),))
    assert made.model_input_spans == [prompt, span(2)]
    assert made.loss_fn_input_spans == [span(3)]
    assert datum.model_input_spans is None
    for spans in (([span(2)], [span(3)]), ([span(3)], [span(2)])):
        with pytest.raises(InputError, match="cover 2 positions of 3"):
            datum.with_provenance(*spans)


def test_span_lists_come_in_pairs_and_hold_spans() -> None:
    with pytest.raises(InputError, match="both"):
        Datum(THREE, {}, [span(3)])
    with pytest.raises(InputTypeError) as caught:
        Datum(THREE, {}, [span(3)], ["x"])  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "Datum.loss_fn_input_spans[0]"


@pytest.mark.parametrize("kind", [PromptProvenanceSpan, SampledProvenanceSpan])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sequence_id": "", "length": 1}, "sequence_id"),
        ({"sequence_id": 5, "length": 1}, "sequence_id"),
        ({"sequence_id": "s", "length": -1}, "length"),
        ({"sequence_id": "s", "length": 1.5}, "length"),
        ({"sequence_id": "s", "length": True}, "length"),
        ({"sequence_id": "s", "length": 1, "offset": 2**64}, "offset"),
    ],
)
def test_bad_spans_are_refused_and_named(
    kind: type[types.PromptProvenanceSpan], fields: dict[str, object], name: str
) -> None:
    with pytest.raises(InputError) as caught:
        kind(**fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == f"{kind.__name__}.{name}"
