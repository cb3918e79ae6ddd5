"""TensorData: what it accepts, how it converts, compares and prints."""

import array
import copy
import pickle
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE_S
from tinkex.errors import InputError, InputTypeError
from tinkex.types import MASK_LOGPROB, PromptAltTokens, TensorData, TopkLogprobs

CSR = {"shape": [2, 3], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}


@pytest.mark.req("S2")
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("float64", "float32"),
        ("float32", "float32"),
        ("float16", "float32"),
        ("int64", "int64"),
        ("int32", "int64"),
        ("int16", "int64"),
        ("uint8", "int64"),
        ("bool", "int64"),
    ],
)
def test_arrays_are_cast_to_the_two_types_that_travel(given: str, dtype: str) -> None:
    from_numpy = TensorData.from_numpy(np.array([0, 1, 1]).astype(given))
    from_torch = TensorData.from_torch(torch.tensor([0, 1, 1]).to(getattr(torch, given)))
    assert from_numpy.dtype == from_torch.dtype == dtype
    assert from_numpy == from_torch == TensorData([0, 1, 1], dtype)  # pyright: ignore[reportArgumentType]
    assert from_numpy.shape == [3]


@pytest.mark.req("S2")
def test_bfloat16_and_gradients_and_strides_are_no_obstacle() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    assert TensorData.from_torch(tensor.t()).tolist() == [[1.0, 1.0]] * 3
    assert TensorData.from_torch(torch.eye(2).to_sparse()).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.req("S2")
@pytest.mark.parametrize("given", ["uint16", "uint32", "uint64", "complex64", "S1", "U1", "M8[s]"])
def test_other_element_types_are_refused_with_the_path(given: str) -> None:
    with pytest.raises(InputTypeError) as caught:
        TensorData(np.zeros(2, given), "float32")
    assert caught.value.path == "TensorData.data"


@pytest.mark.req("S2")
def test_nothing_is_copied_when_the_type_is_right() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = torch.arange(4)
    assert np.shares_memory(TensorData.from_numpy(array).to_numpy(), array)
    assert np.shares_memory(TensorData(array, "float32", [2, 2]).to_numpy(), array)
    assert TensorData.from_torch(tensor).to_torch().data_ptr() == tensor.data_ptr()


def test_read_only_storage_still_becomes_a_torch_tensor() -> None:
    array = np.frombuffer(np.arange(3).tobytes(), np.int64)
    assert TensorData.from_numpy(array).to_torch().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "dtype", "wanted"),
    [
        ([1, 2], "float32", [1.0, 2.0]),
        ((1.0, 2.0), "int64", [1, 2]),
        (range(3), "int64", [0, 1, 2]),
        ([True, False], "int64", [1, 0]),
        ([[1, 2], [3, 4]], "int64", [[1, 2], [3, 4]]),
        ([], "int64", []),
        (None, "float32", []),
        ([np.float32(1), torch.tensor(2)], "float32", [1.0, 2.0]),
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], "int64", [[1, 2], [3, 4]]),
        (np.array(5), "int64", 5),
        (5, "int64", 5),
        (np.float32(1.5), "float32", 1.5),
        (deque([1, 2]), "int64", [1, 2]),
        (array.array("d", [1.5]), "float32", [1.5]),
        (np.array([1, 2.5], object), "float32", [1.0, 2.5]),
        ([2**70], "float32", [float(2**70)]),
    ],
)
def test_lists_and_arrays_become_what_they_say(data: object, dtype: str, wanted: object) -> None:
    assert TensorData(data, dtype).tolist() == wanted  # pyright: ignore[reportArgumentType]


def test_none_is_nan_among_floats_only() -> None:
    assert np.isnan(TensorData([1.0, None], "float32").data[1])
    with pytest.raises(InputError):
        TensorData([1, None], "int64")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"data": [1]}, "TensorData.dtype"),
        ({"data": [1], "dtype": "int32"}, "TensorData.dtype"),
        ({"data": [1], "dtype": np.array([1, 2])}, "TensorData.dtype"),
        ({"data": [1.5], "dtype": "int64"}, "TensorData.data"),
        ({"data": [float("nan")], "dtype": "int64"}, "TensorData.data"),
        ({"data": [2**63], "dtype": "int64"}, "TensorData.data"),
        ({"data": [2**70], "dtype": "int64"}, "TensorData.data"),
        ({"data": [1e300], "dtype": "float32"}, "TensorData.data"),
        ({"data": ["1"], "dtype": "float32"}, "TensorData.data"),
        ({"data": [b"1"], "dtype": "float32"}, "TensorData.data"),
        ({"data": [{}], "dtype": "float32"}, "TensorData.data"),
        ({"data": [1j], "dtype": "float32"}, "TensorData.data"),
        ({"data": [[1], [2, 3]], "dtype": "float32"}, "TensorData.data"),
        ({"data": "12", "dtype": "float32"}, "TensorData.data"),
        ({"data": True, "dtype": "float32"}, "TensorData.data"),
        ({"data": np.array([1, "a"], object), "dtype": "float32"}, "TensorData.data"),
        ({"data": 2**70, "dtype": "int64"}, "TensorData.data"),
        ({"data": [1, 2], "dtype": "int64", "shape": {2}}, "TensorData.shape"),
        ({"data": {1: 2}, "dtype": "float32"}, "TensorData.data"),
        ({"data": [1, 2], "dtype": "int64", "shape": [3]}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": [-1, -1]}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": [2**70]}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": "2"}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": [2.0]}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": [True]}, "TensorData.shape"),
        ({"data": [1, 2], "dtype": "int64", "shape": 2}, "TensorData.shape"),
        ({"data": [1], "dtype": "int64", **CSR, "shape": None}, "TensorData.shape"),
        ({"data": [1], "dtype": "int64", **CSR, "shape": [2]}, "TensorData.shape"),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_col_indices": None},
            "TensorData.sparse_crow_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_crow_indices": [0, 1]},
            "TensorData.sparse_crow_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_crow_indices": [0, 2, 1]},
            "TensorData.sparse_crow_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_crow_indices": [[0, 0, 1]]},
            "TensorData.sparse_crow_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_col_indices": [3]},
            "TensorData.sparse_col_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_col_indices": [-1]},
            "TensorData.sparse_col_indices",
        ),
        (
            {"data": [1], "dtype": "int64", **CSR, "sparse_col_indices": []},
            "TensorData.sparse_col_indices",
        ),
        (
            {
                "data": [1, 2],
                "dtype": "int64",
                "shape": [2, 3],
                "sparse_crow_indices": [0, 0, 2],
                "sparse_col_indices": [2, 2],
            },
            "TensorData.sparse_col_indices",
        ),
    ],
    ids=str,
)
def test_bad_tensors_are_refused_and_named(fields: dict[str, object], path: str) -> None:
    with pytest.raises(InputError) as caught:
        TensorData(**fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == path


def test_the_shape_is_kept_as_given_but_as_a_list() -> None:
    assert TensorData([1, 2], "int64").shape is None
    assert TensorData([1, 2], "int64", (2,)).shape == [2]
    assert TensorData([1, 2], "int64", [-1, 1]).to_numpy().shape == (2, 1)


def test_csr_is_made_dense_without_torch() -> None:
    code = (
        "import sys; from tinkex.types import TensorData;"
        "t = TensorData([0.5], 'float32', [2, 3], [0, 0, 1], [2]);"
        "print(t.tolist(), t.tolist(7)[0], 'torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert shown.stdout.strip() == "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.5]] [7.0, 7.0, 7.0] False"


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        ([0, 2, 4], [0, 2, 1, 1], "column 1 is named twice in row 1"),
        ([0, 3, 4], [2, 0, 2, 2], "column 2 is named twice in row 0"),
        ([0, 1, 4], [0, 3, 1, 3], "column 3 is named twice in row 1"),
    ],
)
def test_a_csr_row_names_a_column_once(crow: list[int], col: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TensorData([1, 2, 3, 4], "int64", [2, 4], crow, col)


@pytest.mark.parametrize(
    ("crow", "col"),
    [([0, 2, 4], [1, 2, 1, 2]), ([0, 2, 4], [2, 1, 2, 1]), ([0, 0, 0], []), ([0], [])],
)
def test_columns_of_a_csr_row_come_in_any_order(crow: list[int], col: list[int]) -> None:
    rows = len(crow) - 1
    made = TensorData(range(len(col)), "int64", [rows, 3], crow, col)  # pyright: ignore[reportArgumentType]
    assert np.count_nonzero(made.to_numpy(-1) >= 0) == len(col)


def test_dimensions_are_known_without_filling() -> None:
    assert TensorData([1], "int64", [2, 10**12], [0, 0, 1], [9]).dims == (2, 10**12)
    assert TensorData([1, 2], "int64").dims == (2,)
    assert TensorData([1, 2], "int64", [1, -1]).dims == (1, 2)


def test_sparse_is_chosen_only_when_it_is_smaller() -> None:
    thin = torch.zeros(4, 10)
    thin[1, 3] = 2.0
    sparse = TensorData.from_torch_sparse(thin)
    assert sparse.sparse_crow_indices == [0, 0, 1, 1, 1]
    assert sparse.sparse_col_indices == [3]
    assert sparse.data == [2.0]
    assert sparse.shape == [4, 10]
    assert torch.equal(sparse.to_torch(), thin)
    assert TensorData.from_torch_sparse(torch.ones(4, 10)).sparse_crow_indices is None
    assert TensorData.from_torch_sparse(torch.zeros(5)).sparse_crow_indices is None
    padded = torch.full((4, 10), -1)
    assert TensorData.from_torch_sparse(padded, pad_value=-1).tolist(-1) == padded.tolist()


@pytest.mark.parametrize("pad", [True, 1.0, "0", None])
def test_pad_values_are_integers(pad: object) -> None:
    with pytest.raises(InputTypeError) as caught:
        TensorData([1], "int64").tolist(pad)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "pad_value"


def test_a_dense_form_that_cannot_exist_is_an_input_error() -> None:
    huge = TensorData([], "float32", [1, 2**55], [0, 0], [])
    with pytest.raises(InputError):
        huge.to_numpy()


@pytest.mark.req("B12")
def test_tensors_compare_by_value_and_nan_equals_nan() -> None:
    assert TensorData([1.0, float("nan")], "float32") == TensorData([1.0, float("nan")], "float32")
    assert TensorData([1, 2], "int64") == TensorData([1, 2], "int64", [2])
    assert TensorData([1, 2], "int64") != TensorData([1, 2], "float32")
    assert TensorData([1, 2], "int64") != TensorData([1, 2], "int64", [2, 1])
    assert TensorData([1], "int64", **CSR) == TensorData([1], "int64", **CSR)  # pyright: ignore[reportArgumentType]
    assert TensorData([1], "int64", **CSR) != TensorData([1], "int64", **{**CSR, "shape": [2, 4]})  # pyright: ignore[reportArgumentType]
    assert TensorData([1], "int64") != [1]


@pytest.mark.req("B12")
def test_reprs_show_type_shape_and_the_first_numbers() -> None:
    assert repr(TensorData(range(10), "int64")) == (
        "TensorData(dtype='int64', shape=[10], data=[0, 1, 2, 3, 4, 5, ...])"
    )
    assert "layout='csr'" in repr(TensorData([1], "int64", **CSR))  # pyright: ignore[reportArgumentType]


@pytest.mark.req("S12")
def test_tensors_are_immutable_and_picklable() -> None:
    tensor = TensorData([1], "int64", **CSR)  # pyright: ignore[reportArgumentType]
    for kind in (AttributeError, ValueError):
        with pytest.raises(kind, match="make a new one"):
            tensor.dtype = "float32"
        with pytest.raises(kind, match="make a new one"):
            del tensor.shape  # pyright: ignore[reportAttributeAccessIssue]
    for twin in (pickle.loads(pickle.dumps(tensor)), copy.copy(tensor), copy.deepcopy(tensor)):
        assert twin == tensor
        assert twin.sparse_col_indices == [2]


def test_sizes_count_the_indices() -> None:
    assert TensorData([1.0, 2.0], "float32").size_bytes == 8
    assert TensorData([1.0], "float32", **CSR).size_bytes == 4 + 8 * 4  # pyright: ignore[reportArgumentType]


def test_json_form_round_trips_and_refuses_unknown_members() -> None:
    tensor = TensorData([0.5], "float32", **CSR)  # pyright: ignore[reportArgumentType]
    assert TensorData.from_json(tensor.to_json()) == tensor
    assert TensorData([1], "int64").to_json() == {"data": [1], "dtype": "int64"}
    for bad in (5, [1], {"data": [1], "dtype": "int64", "device": "cpu"}):
        with pytest.raises(InputError):
            TensorData.from_json(bad)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.array(1.5)])
def test_a_single_number_of_numpy_has_no_dimensions(scalar: object) -> None:
    tensor = TensorData.from_numpy(scalar)
    assert (tensor.shape, tensor.dtype, tensor.tolist()) == ([], "float32", 1.5)


def test_foreign_objects_are_refused_by_the_named_constructors() -> None:
    with pytest.raises(InputTypeError):
        TensorData.from_numpy([1, 2])
    with pytest.raises(InputTypeError):
        TensorData.from_torch(np.zeros(2))  # pyright: ignore[reportArgumentType]


def test_topk_rows_lose_their_padding() -> None:
    topk = TopkLogprobs(
        np.array([[5, 6], [7, 0], [0, 0]], np.int32),
        np.array([[-1, -2], [-3, MASK_LOGPROB], [MASK_LOGPROB, MASK_LOGPROB]], np.float32),
    )
    rows = [[(5, -1.0), (6, -2.0)], [(7, -3.0)], None]
    assert topk.to_lists() == rows
    assert TopkLogprobs.from_lists(rows) == topk
    assert TopkLogprobs.from_lists([]).to_lists() == []
    assert TopkLogprobs.from_lists([None]).to_lists() == [None]
    assert pickle.loads(pickle.dumps(topk)) == topk


@pytest.mark.parametrize("shapes", [((2,), (2,)), ((1, 2), (2, 1)), ((1, 2, 3), (1, 2, 3))])
def test_topk_arrays_must_agree(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(InputError):
        TopkLogprobs(np.zeros(shapes[0], np.int32), np.zeros(shapes[1], np.float32))


def test_alternative_tokens_hold_tensors() -> None:
    tensor = TensorData([1], "int64")
    assert PromptAltTokens(tensor, tensor) == PromptAltTokens(tokens=tensor, logprobs=tensor)
    with pytest.raises(InputTypeError) as caught:
        PromptAltTokens(tensor, [1.0])  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "PromptAltTokens.logprobs"
