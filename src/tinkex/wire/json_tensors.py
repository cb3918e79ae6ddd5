"""Tensors in JSON: `data`, `dtype`, `shape` and, when sparse, the CSR indices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError
from tinkex.types import TensorData
from tinkex.wire.arrays import MAX_DENSE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMBERS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")


def tensor_to_json(tensor: TensorData) -> dict[str, Any]:
    """The JSON object of a tensor; refuses numbers that JSON does not have."""
    body = tensor.to_json()
    if tensor.dtype == "float32" and not all(map(math.isfinite, body["data"])):
        raise InputError("NaN and infinity cannot be sent as JSON", "TensorData.data")
    return body


def tensor_from_json(obj: Any) -> TensorData:
    """A tensor from its JSON object, skipping members it does not have."""
    if isinstance(obj, dict):
        fields = cast("dict[str, Any]", obj)
        _check_size(fields.get("shape"))
        obj = {name: fields[name] for name in _MEMBERS if name in fields}
    return TensorData.from_json(obj)


def _check_size(shape: Any) -> None:
    """A sparse tensor is short to write and as large as its shape once somebody fills it."""
    if not isinstance(shape, list):
        return
    sizes = [size for size in cast("Iterable[Any]", shape) if isinstance(size, int)]
    if any(size < 0 for size in sizes) or math.prod(sizes) * 8 > MAX_DENSE_BYTES:
        raise InputError(f"{shape} is not a possible shape", "TensorData.shape")
