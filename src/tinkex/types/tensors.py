"""Tensor payloads: `TensorData`, and the small array records that sampling answers carry.

Storage is numpy, int64 or float32, dense or CSR. Python lists are made only when asked for, and
numpy itself is loaded when the first tensor is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.arrays import (
    TensorDtype,
    cast_array,
    is_number,
    is_numpy,
    is_numpy_scalar,
    is_torch,
    private_array,
    same_array,
    to_array,
    torch_to_numpy,
)
from tinkex.types.value import FrozenValueError, pydantic_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tinkex.types.arrays import Array

MASK_LOGPROB = -99999.0
"""The log-probability of an empty cell in `TopkLogprobs`."""


# What can write to the storage of a dense tensor: other code that has the array, only this
# tensor, or only this one and its private copies. In the first case a call copies the storage, in
# the last it is copied before other code gets it. So tensors made from lists are rarely copied.
_EXPOSED, _OWNED, _SHARED = range(3)


def _holders(array: Array) -> int:
    """What can write to an array that was made here."""
    return _OWNED if array.flags.owndata else _EXPOSED


class TensorData:
    """A dense or CSR array of int64 or float32 values.

    Arrays and tensors of the right element type are used without copying, so later changes
    to them show through; a call takes its own copy when it is made. Compares by value; NaN
    equals NaN.
    """

    __slots__ = ("_col", "_crow", "_holders", "_numpy", "_shape", "dtype")

    dtype: TensorDtype
    _shape: tuple[int, ...] | None
    _numpy: Array
    _crow: Array | None
    _col: Array | None
    _holders: int

    def __init__(
        self,
        data: Any = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype is None:
            raise InputTypeError('is required: "int64" or "float32"', "TensorData.dtype")
        if not isinstance(dtype, str) or dtype not in ("int64", "float32"):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputError(
                f'must be "int64" or "float32", got {quoted(dtype)}', "TensorData.dtype"
            )
        if is_number(data):
            array = to_array([data], dtype, "TensorData.data").reshape(())
        else:
            array = to_array([] if data is None else data, dtype, "TensorData.data")
        dims = None if shape is None else _dims(shape)
        crow = _indices(sparse_crow_indices, "TensorData.sparse_crow_indices")
        col = _indices(sparse_col_indices, "TensorData.sparse_col_indices")
        if crow is None and col is None:
            array = array if dims is None else _reshape(array, dims)
        else:
            array = array.reshape(-1)
            _check_csr(array, dims, crow, col)
        self._fill(array, dims, crow, col, _EXPOSED if array is data else _holders(array))

    def _fill(
        self,
        array: Array,
        shape: Sequence[int] | None,
        crow: Array | None,
        col: Array | None,
        holders: int,
    ) -> None:
        put = object.__setattr__
        put(self, "_numpy", array)
        # Storage is one of the two; the name of a dtype is slow to ask for.
        put(self, "dtype", "float32" if array.dtype.kind == "f" else "int64")
        put(self, "_shape", None if shape is None else tuple(shape))
        put(self, "_crow", crow)
        put(self, "_col", col)
        put(self, "_holders", holders)

    @classmethod
    def _make(
        cls,
        array: Array,
        shape: Sequence[int] | None,
        crow: Array | None = None,
        col: Array | None = None,
        holders: int = 0,
    ) -> Self:
        """Wrap arrays that are known to be right."""
        self = cls.__new__(cls)
        self._fill(array, shape, crow, col, holders)
        return self

    def _copy(self) -> TensorData:
        """The same values in memory that no other code can write to."""
        if self._holders != _EXPOSED:
            object.__setattr__(self, "_holders", _SHARED)
            return TensorData._make(self._numpy, self._shape, holders=_SHARED)
        array = private_array(self._numpy)
        if self._is_intact():
            return TensorData._make(array, self._shape)
        crow, col = (
            None if indices is None else private_array(indices)
            for indices in (self._crow, self._col)
        )
        return TensorData(array, self.dtype, self._shape, crow, col)  # pyright: ignore[reportArgumentType] -- arrays are sequences, too

    def _is_intact(self) -> bool:
        """Whether it is dense and its array was not given another shape or type in place."""
        array, shape = self._numpy, self._shape
        same = array.dtype.kind == self.dtype[0] and (shape is None or array.shape == shape)
        return same and self._crow is None

    def _exposed(self) -> Array:
        """The dense storage, for code that may write to it."""
        if self._holders != _EXPOSED:
            if self._holders == _SHARED:
                object.__setattr__(self, "_numpy", self._numpy.copy())
            object.__setattr__(self, "_holders", _EXPOSED)
        return self._numpy

    def __setattr__(self, name: str, *value: object) -> None:
        raise FrozenValueError("tensors cannot be changed; make a new one", f"TensorData.{name}")

    __delattr__ = __setattr__

    @classmethod
    def from_numpy(cls, array: Any) -> Self:
        """Wrap a numpy array: floats become float32, integers and bools int64."""
        path = "TensorData.from_numpy"
        if not is_numpy(array):
            if not is_numpy_scalar(array):
                raise InputTypeError(f"expected a numpy array, got {type(array).__name__}", path)
            import numpy as np

            array = np.asarray(array)
        return cls._dense(cast_array(array, None, path), array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Wrap a torch tensor of any device: floats become float32, integers and bools int64."""
        array = _torch(tensor, "from_torch")
        return cls._dense(cast_array(array, None, "TensorData.from_torch"), array)

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Like `from_torch`, but CSR when leaving out `pad_value` makes a matrix smaller."""
        _check_pad(pad_value)
        path = "TensorData.from_torch_sparse"
        return cls._sparsified(cast_array(_torch(tensor, path), None, path), pad_value)

    @classmethod
    def _dense(cls, array: Array, given: object) -> Self:
        """Wrap what `given` became."""
        holders = _EXPOSED if array is given else _holders(array)
        return cls._make(array, array.shape, holders=holders)

    @classmethod
    def _sparsified(cls, array: Array, pad_value: int = 0) -> Self:
        import numpy as np

        if array.ndim != 2:
            return cls._make(array, array.shape)
        rows, cols = array.shape
        kept = array != pad_value
        if rows + 1 + 2 * int(np.count_nonzero(kept)) >= rows * cols:
            return cls._make(array, array.shape)
        crow = np.zeros(rows + 1, np.int64)
        np.cumsum(np.count_nonzero(kept, axis=1), out=crow[1:])
        return cls._make(array[kept], [rows, cols], crow, np.nonzero(kept)[1].astype(np.int64))

    @classmethod
    def from_json(cls, obj: Any) -> Self:
        """Make one from its JSON object (`data`, `dtype`, `shape`, CSR indices)."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, dict):
            raise InputTypeError(f"expected TensorData, got {type(obj).__name__}", "TensorData")
        fields = cast("dict[str, Any]", obj)
        known = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
        for name in fields:
            if name not in known:
                raise InputTypeError("there is no such field", f"TensorData.{name}")
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of this tensor; members that are unset are left out."""
        fields: dict[str, Any] = {"data": self.data, "dtype": self.dtype}
        if self._shape is not None:
            fields["shape"] = list(self._shape)
        if self._crow is not None:
            fields["sparse_crow_indices"] = self.sparse_crow_indices
            fields["sparse_col_indices"] = self.sparse_col_indices
        return fields

    @property
    def shape(self) -> list[int] | None:
        """The shape it was given, as a new list; None when it was given none."""
        return None if self._shape is None else list(self._shape)

    @property
    def data(self) -> list[int] | list[float]:
        """The stored values as a flat list; for CSR the listed values only."""
        return cast("list[int] | list[float]", self._numpy.reshape(-1).tolist())

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """Where each row starts in the CSR values, or None when dense."""
        return None if self._crow is None else cast("list[int]", self._crow.tolist())

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The column of each CSR value, or None when dense."""
        return None if self._col is None else cast("list[int]", self._col.tolist())

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the array this stands for, known without filling it."""
        return self._numpy.shape if self._crow is None else self._shape or ()

    @property
    def size_bytes(self) -> int:
        """Bytes of storage, CSR indices included."""
        indices = 0 if self._crow is None or self._col is None else self._crow.size + self._col.size
        return self._numpy.nbytes + 8 * indices

    def to_numpy(self, pad_value: int = 0) -> Array:
        """The values as an array: the storage itself when dense, else filled with `pad_value`."""
        _check_pad(pad_value)
        if self._crow is None:
            return self._exposed()
        import numpy as np

        assert self._shape is not None
        try:
            dense = np.full(self._shape, pad_value, self._numpy.dtype)
        except (MemoryError, OverflowError, ValueError):
            raise InputError(
                f"cannot fill shape {self.shape} with {pad_value}", "TensorData"
            ) from None
        dense[np.repeat(np.arange(self._shape[0]), np.diff(self._crow)), self._col] = self._numpy
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """The values as a torch tensor; shares memory with the storage where that is writable."""
        import torch

        array = self.to_numpy(pad_value)
        return torch.from_numpy(array if array.flags.writeable else array.copy())  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

    def tolist(self, pad_value: int = 0) -> Any:
        """The values as nested lists, or one number for rank 0."""
        return self.to_numpy(pad_value).tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        if self._crow is not None and self._shape != other._shape:
            return False
        return (
            same_array(self._numpy, other._numpy)
            and same_array(self._crow, other._crow)
            and same_array(self._col, other._col)
        )

    def __repr__(self) -> str:
        flat = self._numpy.reshape(-1)
        numbers = ", ".join(f"{number:.6g}" for number in flat[:6].tolist())
        more = ", ..." if flat.size > 6 else ""
        layout = "" if self._crow is None else ", layout='csr'"
        shape = list(self._numpy.shape) if self.shape is None else self.shape
        return f"TensorData(dtype={self.dtype!r}, shape={shape}{layout}, data=[{numbers}{more}])"

    def __reduce__(self) -> tuple[Any, ...]:
        return (TensorData._make, (self._exposed(), self._shape, self._crow, self._col))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return pydantic_schema(core_schema, cls.from_json, cls.to_json)


def _torch(tensor: Any, name: str) -> Array:
    if not is_torch(tensor):
        raise InputTypeError(f"expected a torch tensor, got {type(tensor).__name__}", name)
    return torch_to_numpy(tensor, name)


def _check_pad(pad_value: Any) -> None:
    kind = getattr(getattr(pad_value, "dtype", None), "kind", None)
    if isinstance(pad_value, bool) or not (isinstance(pad_value, int) or kind == "i"):
        raise InputTypeError(f"expected int, got {type(pad_value).__name__}", "pad_value")


def _dims(shape: Any) -> list[int]:
    path = "TensorData.shape"
    try:
        dims = [dim.__index__() for dim in shape if not isinstance(dim, bool)]
        if len(dims) == len(shape) and not isinstance(shape, Set | Mapping):
            return dims
    except (TypeError, AttributeError):
        pass
    raise InputTypeError(f"expected a list of int, got {quoted(cast('Any', shape))}", path)


def _reshape(array: Array, dims: list[int]) -> Array:
    if list(array.shape) == dims:
        return array
    try:
        return array.reshape(dims)
    except (ValueError, OverflowError):
        raise InputError(
            f"{array.size} values do not fill shape {dims}", "TensorData.shape"
        ) from None


def _indices(value: Any, path: str) -> Array | None:
    if value is None:
        return None
    array = to_array(value, "int64", path)
    if array.ndim != 1:
        raise InputError("expected a flat list", path)
    return array


def _check_csr(
    values: Array, shape: list[int] | None, crow: Array | None, col: Array | None
) -> None:
    path = "TensorData.sparse_crow_indices"
    if crow is None or col is None:
        raise InputError("CSR needs both index lists", path)
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise InputError(f"CSR needs a shape [rows, columns], got {shape}", "TensorData.shape")
    rows, cols = shape
    if (
        crow.size != rows + 1
        or crow[0] != 0
        or crow[-1] != values.size
        or (crow[1:] < crow[:-1]).any()
    ):
        raise InputError(
            f"expected {rows + 1} offsets that grow from 0 to {values.size}, the number of values",
            path,
        )
    path = "TensorData.sparse_col_indices"
    if col.size != values.size:
        raise InputError(f"expected {values.size} columns, one per value, got {col.size}", path)
    if col.size and (int(col.min()) < 0 or int(col.max()) >= cols):
        raise InputError(f"columns must be between 0 and {cols - 1}", path)
    twice = _named_twice(crow, col)
    if twice is not None:
        raise InputError(f"column {twice[1]} is named twice in row {twice[0]}", path)


def _named_twice(crow: Array, col: Array) -> tuple[int, int] | None:
    """A row and a column that it names more than once."""
    import numpy as np

    grows = np.ones(col.size + 1, np.bool_)
    grows[1:-1] = col[1:] > col[:-1]
    grows[crow] = True  # where a row begins nothing comes before
    if grows.all():
        return None
    row = np.repeat(np.arange(crow.size - 1), np.diff(crow))
    order = np.lexsort((col, row))
    row, col = row[order], col[order]
    twice = np.flatnonzero((row[1:] == row[:-1]) & (col[1:] == col[:-1]))
    return (int(row[twice[0]]), int(col[twice[0]])) if twice.size else None


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The best k tokens of n positions; empty cells are id 0 with `MASK_LOGPROB`."""

    token_ids: Array
    logprobs: Array

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "token_ids", int32_array(self.token_ids, "TopkLogprobs.token_ids"))
        put(self, "logprobs", to_array(self.logprobs, "float32", "TopkLogprobs.logprobs"))
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise InputError(
                f"expected two arrays of one shape (n, k), got {self.token_ids.shape} "
                f"and {self.logprobs.shape}",
                "TopkLogprobs",
            )

    def to_lists(self) -> list[list[tuple[int, float]] | None]:
        """One list of (token, log-probability) per position, None where there is none."""
        kept = self.logprobs != MASK_LOGPROB
        # Only trailing cells are empty, so the length of a row is where its last value is.
        lengths = (kept * range(1, kept.shape[1] + 1)).max(axis=1, initial=0).tolist()
        rows = zip(
            self.token_ids.tolist(), self.logprobs.tolist(), kept.tolist(), lengths, strict=True
        )
        return [
            list(zip(ids[:length], logprobs[:length], strict=True)) if full and full[0] else None
            for ids, logprobs, full, length in rows
        ]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[tuple[int, float]] | None]) -> Self:
        """The opposite of `to_lists`."""
        import numpy as np

        full = [list(row or ()) for row in rows]
        width = max((len(row) for row in full), default=0)
        full = [row + [(0, MASK_LOGPROB)] * (width - len(row)) for row in full]
        if width == 0:
            return cls(np.zeros((len(full), 0), np.int32), np.zeros((len(full), 0), np.float32))
        return cls(
            cast("Array", [[token for token, _ in row] for row in full]),
            cast("Array", [[logprob for _, logprob in row] for row in full]),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        return same_array(self.token_ids, other.token_ids) and same_array(
            self.logprobs, other.logprobs
        )


def int32_array(value: Any, path: str) -> Array:
    """Token ids as the int32 array that answers carry."""
    import numpy as np

    if is_numpy(value) and value.dtype == np.int32 and value.flags.c_contiguous:
        return cast("Array", value)
    array = to_array(value, "int64", path)
    if array.size and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        raise InputError("a token id does not fit into 32 bits", path)
    return array.astype(np.int32)


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Alternative draws at each prompt position but the first, both `[len(prompt) - 1, k]`."""

    tokens: TensorData
    logprobs: TensorData

    def __post_init__(self) -> None:
        for name in ("tokens", "logprobs"):
            if not isinstance(getattr(self, name), TensorData):
                raise InputTypeError("expected TensorData", f"PromptAltTokens.{name}")
