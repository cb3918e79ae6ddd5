"""Values inside bodies: packed arrays and tensors, and errors that name a value's place.

Arrays on the wire are little-endian and C-contiguous. Everything decoded here is checked first, so
that malformed bytes end in an InputError and never in a large allocation. Decoded arrays own their
memory and can be written to.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import InputError
from tinkex.types import TensorData
from tinkex.types.bounds import TENSOR_BYTES, TENSOR_DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from google.protobuf.message import Message

    from tinkex.types import TensorDtype
    from tinkex.wire import tinkex_pb2 as pb

    AnyArray = npt.NDArray[Any]

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound="Message")

FLOAT32 = 1
INT64 = 2
INT32 = 3
BFLOAT16 = 4

NATIVE = sys.byteorder == "little"
ITEM_BYTES = {FLOAT32: 4, INT64: 8, INT32: 4, BFLOAT16: 2}
_WIDTHS = {"<f4": 4, "<i8": 8, "<i4": 4, "<u2": 2}
_CODES: dict[str, int] = {"float32": FLOAT32, "int64": INT64}
PACKED: dict[str, str] = {"float32": "<f4", "int64": "<i8"}


def little_endian(array: AnyArray) -> AnyArray:
    """The array in the wire's byte order: itself, except on a big-endian machine."""
    return array if NATIVE else array.astype(array.dtype.newbyteorder("<"))


def pack(array: AnyArray, dtype: str) -> bytes:
    """The array's bytes in the given wire dtype, such as `<i4`."""
    return array.astype(dtype, copy=False).tobytes()


def pack_ints(values: Sequence[int]) -> bytes:
    """Offsets or indices as packed int64."""
    import numpy as np

    return np.asarray(values, dtype="<i8").tobytes()


def unpack(data: bytes, dtype: str, path: str) -> AnyArray:
    """A one-dimensional array of the given wire dtype, in native order."""
    import numpy as np

    if len(data) % _WIDTHS[dtype]:
        raise InputError(f"{len(data)} bytes are no whole number of {dtype} values", path)
    # A bytearray makes the array writable: torch warns about sharing one that is not.
    array = np.frombuffer(bytearray(data), dtype)
    return array if NATIVE else array.astype(array.dtype.newbyteorder("="))


def widen(data: bytes, code: int, path: str) -> tuple[AnyArray, TensorDtype]:
    """A flat array of one of the protocol's dtypes, as float32 or int64."""
    if code == FLOAT32:
        return unpack(data, "<f4", path), "float32"
    if code == INT64:
        return unpack(data, "<i8", path), "int64"
    if code == INT32:
        return unpack(data, "<i4", path).astype("i8"), "int64"
    if code == BFLOAT16:
        # bfloat16 is the upper half of a float32.
        bits = unpack(data, "<u2", path).astype("u4") << 16
        return bits.view("f4"), "float32"
    raise InputError(f"unknown dtype number {code}; known are 1 to 4", path)


def item_bytes(code: int, path: str) -> int:
    """How many bytes one value takes on the wire."""
    size = ITEM_BYTES.get(code)
    if size is None:
        raise InputError(f"unknown dtype number {code}; known are 1 to 4", path)
    return size


def dtype_code(dtype: str) -> int:
    """The protocol's number of a tensor dtype."""
    return _CODES[dtype]


def reshape(array: AnyArray, shape: Sequence[int], path: str) -> AnyArray:
    """The array in a shape that came with it; raises InputError when it does not fit."""
    if any(size < 0 for size in shape):
        raise InputError(f"shape {list(shape)} has a negative size", path)
    if math.prod(shape) != array.size:
        raise InputError(f"shape {list(shape)} does not fit {array.size} values", path)
    try:
        return array.reshape(tuple(shape))
    except (
        ValueError,
        OverflowError,
    ) as error:  # too many or huge dimensions
        raise InputError(f"shape {list(shape)} is not possible: {error}", path) from error


def fill_tensor(message: pb.Tensor, tensor: TensorData) -> None:
    """Write a tensor into its message."""
    # The storage itself: the public properties would make lists of it.
    values, crow, col = tensor._numpy, tensor._crow, tensor._col  # pyright: ignore[reportPrivateUsage]
    packed = pack(values, PACKED[tensor.dtype])
    if crow is None or col is None:
        message.dense = packed
    else:
        message.sparse_csr.values = packed
        message.sparse_csr.crow_indices = pack(crow, "<i8")
        message.sparse_csr.col_indices = pack(col, "<i8")
    message.dtype = _CODES[tensor.dtype]
    if tensor.shape is not None:
        message.shape.extend(tensor.shape)


def read_tensor(message: pb.Tensor, path: str) -> TensorData:
    """Read a tensor; without a shape it is one-dimensional."""
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        raise InputError("the tensor carries no values; expected dense or sparse_csr", path)
    if len(message.shape) > TENSOR_DIMENSIONS:
        raise InputError(too_many_dimensions(len(message.shape)), path)
    shape = list(message.shape)
    if encoding == "sparse_csr":
        return _read_csr(message, shape, path)
    values, _ = widen(message.dense, message.dtype, path)
    shape = shape or [values.size]
    return TensorData._make(reshape(values, shape, path), shape)  # pyright: ignore[reportPrivateUsage] - checked above


def too_many_dimensions(count: int) -> str:
    """What is wrong with the shape of a tensor that has so many."""
    return f"a tensor may have {TENSOR_DIMENSIONS} dimensions, not {count}"


def _read_csr(message: pb.Tensor, shape: list[int], path: str) -> TensorData:
    if len(shape) != 2 or min(shape) < 0:
        raise InputError(f"a sparse tensor has two dimensions, not the shape {shape}", path)
    rows, cols = shape
    if rows * cols * item_bytes(message.dtype, path) > TENSOR_BYTES:
        raise InputError(f"a tensor of shape {shape} is larger than {TENSOR_BYTES} bytes", path)
    csr = message.sparse_csr
    values, dtype = widen(csr.values, message.dtype, path)
    return construct(
        path,
        TensorData,
        data=values,
        dtype=dtype,
        shape=shape,
        sparse_crow_indices=unpack(csr.crow_indices, "<i8", path),
        sparse_col_indices=unpack(csr.col_indices, "<i8", path),
    )


# -- messages and places ---------------------------------------------------------------------


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Parse one message; raises InputError for malformed bytes."""
    try:
        return kind.FromString(data)
    except _decode_error() as error:  # evaluated, and imported, only when something was raised
        raise InputError(f"the body is not a valid {kind.__name__}: {error}") from error


def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    return DecodeError


def construct(path: str, make: Callable[..., T], **fields: Any) -> T:
    """Call a constructor; its InputError then names the value's place in the body."""
    try:
        return make(**fields)
    except InputError as error:
        raise placed(error, make.__name__, path) from error


def placed(error: InputError, name: str, path: str) -> InputError:
    """The error of a constructor with `path` in place of the name of its class."""
    inner = error.path.removeprefix(name).removeprefix(".")
    glue = "." if path and inner and not inner.startswith("[") else ""
    return type(error)(error.reason, f"{path}{glue}{inner}")
