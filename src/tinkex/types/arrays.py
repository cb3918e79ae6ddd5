"""Conversion of anything array-like to an int64 or float32 numpy array, or an error with its path.

The one place that knows which element types are sent and what may be cast into them. Torch is
never imported here: a torch tensor can only exist where the caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from tinkex.errors import InputError, InputTypeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

TensorDtype = Literal["int64", "float32"]
"""The element types that are sent."""


# Sequences, but not of numbers that a caller means.
_NO_NUMBERS: Final = (str, bytes, bytearray, memoryview)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor."""
    return _is_one(value, "torch", "Tensor")


def is_numpy(value: object) -> bool:
    """Whether `value` is a numpy array."""
    return _is_one(value, "numpy", "ndarray")


def is_numpy_scalar(value: object) -> bool:
    """Whether `value` is a single number of numpy's, such as `np.float32(1)`."""
    return _is_one(value, "numpy", "generic")


def _is_one(value: object, module: str, name: str) -> bool:
    # A module that another thread is just importing may lack the type, and then no value has it.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_number(value: object) -> bool:
    """Whether `value` is a single number of Python's or numpy's; True is none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or is_numpy_scalar(value)


def plain_number(value: Any) -> Any:
    """A numpy or torch scalar as a Python number; anything else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def to_array(value: Any, dtype: TensorDtype | None, path: str) -> Array:
    """`value` as a C-ordered array of `dtype`, or of the type that its elements suggest.

    Shares memory with `value` whenever that already has the right layout.
    """
    if is_torch(value):
        return cast_array(torch_to_numpy(value, path), dtype, path)
    if is_numpy(value):
        if value.dtype.kind == "O":
            return _from_sequence(cast("Array", value).tolist(), dtype, path)
        return cast_array(value, dtype, path)
    if isinstance(value, list | tuple | range):
        return _from_sequence(cast("Sequence[Any]", value), dtype, path)
    if isinstance(value, Sequence) and not isinstance(value, _NO_NUMBERS):
        return _from_sequence(list(cast("Sequence[Any]", value)), dtype, path)
    kind = type(cast("Any", value)).__name__
    raise InputTypeError(f"expected a list, tuple, numpy array or torch tensor, got {kind}", path)


def torch_to_numpy(tensor: Any, path: str) -> Array:
    """The tensor's values on the CPU, without a copy where there is nothing to convert."""
    try:
        if tensor.layout != sys.modules["torch"].strided:
            tensor = tensor.to_dense()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        return cast("Array", tensor.numpy(force=True))
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise InputTypeError(f"cannot read this torch tensor: {error}", path) from error


def cast_array(array: Array, dtype: TensorDtype | None, path: str) -> Array:
    """`array` as C-ordered int64 or float32."""
    import numpy as np

    kind = _kind(array.dtype)
    if kind is None:
        raise InputTypeError(
            f"element type {array.dtype.name} does not travel; "
            'convert it with .astype("float32") or .astype("int64")',
            path,
        )
    wanted = np.dtype(dtype or ("float32" if kind == "f" else "int64"))
    if array.dtype != wanted:
        array = _to_float32(array, path) if wanted.kind == "f" else _to_int64(array, path)
    return array if array.flags.c_contiguous else array.copy(order="C")


def _kind(dtype: np.dtype[Any]) -> str | None:
    """`f` for what becomes float32, `i` for what becomes int64, None for the rest."""
    kind = dtype.kind
    if kind == "f" and dtype.itemsize <= 8:
        return "f"
    if kind in "ib" or (kind == "u" and dtype.itemsize == 1):
        return "i"
    # Not a type of numpy's own, and slow to ask for.
    return "f" if dtype.name == "bfloat16" else None


def _to_float32(array: Array, path: str) -> Array:
    import numpy as np

    try:
        with np.errstate(over="raise"):
            return array.astype(np.float32)
    except FloatingPointError:
        raise InputError("a value is too large for float32", path) from None


def _to_int64(array: Array, path: str) -> Array:
    import numpy as np

    if array.dtype.kind not in "f":
        return array.astype(np.int64)
    whole = np.isfinite(array) & (array == np.trunc(array)) & (np.abs(array) < 2.0**63)
    if not whole.all():
        where = int(np.flatnonzero(~whole.ravel())[0])
        raise InputError(
            f"expected whole numbers, got {array.ravel()[where]} at position {where}", path
        )
    return array.astype(np.int64)


def _from_sequence(value: Sequence[Any], dtype: TensorDtype | None, path: str) -> Array:
    import numpy as np

    if len(value) and is_torch(value[0]):
        value = [torch_to_numpy(item, path) if is_torch(item) else item for item in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        if "inhomogeneous" in str(error):
            raise InputError("rows have different lengths", path) from None
        raise InputTypeError(f"cannot make an array of this: {error}", path) from error
    if array.size == 0:
        return array.astype(dtype or "float32")
    if array.dtype.kind == "O":
        array = _from_objects(array, dtype, path)
    if array.dtype.kind == "u" and int(array.max()) < 2**63:
        array = array.astype(np.int64)
    if _kind(array.dtype) is None:
        found = next((item for item in value if not isinstance(item, int | float)), value[0])
        raise InputTypeError(f"expected numbers, got {type(found).__name__} {_short(found)}", path)
    return cast_array(array, dtype, path)


def _from_objects(array: Array, dtype: TensorDtype | None, path: str) -> Array:
    """A list with None in it: None means NaN where floats are expected."""
    import numpy as np

    for item in array.ravel():
        if item is None:
            if dtype == "int64":
                raise InputTypeError("expected whole numbers, got None", path)
        elif not isinstance(item, int | float | np.number):
            raise InputTypeError(f"expected numbers, got {type(item).__name__}", path)
    try:
        floats = dtype == "float32" or None in array.ravel().tolist()
        return np.array(array, dtype=np.float64 if floats else np.int64)
    except OverflowError:
        raise InputError("a number does not fit into 64 bits", path) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def private_array(array: Array) -> Array:
    """`array` itself when no code can write to its memory, else a copy."""
    holder: Any = array
    while is_numpy(holder) and not holder.flags.writeable:
        holder = holder.base
    return array if isinstance(holder, bytes) else array.copy()


def same_array(left: Array | None, right: Array | None) -> bool:
    """Whether two arrays hold the same values; NaN is the same as NaN."""
    import numpy as np

    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))
