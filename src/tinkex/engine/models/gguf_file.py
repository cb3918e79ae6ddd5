"""The container of a GGUF file: its metadata, and its tensors as float32.

The header is read here and not by the package `gguf`, whose reader takes seconds for a
vocabulary and does not say at which tensor a truncated file ends. The package knows the
quantised types. Format: GGUF versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        **dict(enumerate("BbHhIif?")),
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_T = TypeVar("_T")
_Value = int | float | bool | str | list["_Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file; `shape` has the rows first, as in PyTorch."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size_bytes: int


class GgufFile:
    """An open GGUF file, a context manager; tensors are mapped, not read, until asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ModelError(f"{path}: cannot be read: {error}") from error
        try:
            header = _Header(path, self._map)
            self.metadata, self.tensors = header.read()
            self._check_size()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *outcome: object) -> None:
        self._map.close()

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return one value of the metadata; without a default it must be there."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {key!r}")
        if not isinstance(value, kind):
            raise ModelError(
                f"{self.path}: {key!r} in the metadata is of type {type(value).__name__}, "
                f"not {kind.__name__}"
            )
        return value

    def strings(self, key: str) -> list[str]:
        """Return one list of strings of the metadata."""
        return cast("list[str]", self.get(key, list))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor, dequantised."""
        tensor = self.tensors[name]
        # A copy of the bytes: a view would keep the map from closing.
        raw = self._map[tensor.offset : tensor.offset + tensor.size_bytes]
        try:
            values = dequantize(np.frombuffer(raw, dtype=np.uint8), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: the tensor {name!r} is stored as {tensor.kind.name}, "
                "which cannot be dequantised"
            ) from error
        return values.astype(np.float32, copy=not values.flags.writeable).reshape(tensor.shape)

    def _check_size(self) -> None:
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset + tensor.size_bytes > len(self._map):
                raise ModelError(
                    f"{self.path}: is truncated: it ends inside or before the tensor {name!r}"
                )


class _Header:
    """Reads the header from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, _Value], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self._path}: is no GGUF file")
        version = self._number(4)
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version} is not supported")
        tensor_count, value_count = self._number(10), self._number(10)
        metadata: dict[str, _Value] = {}
        for _ in range(value_count):
            key = self._string()
            metadata[key] = self._value(self._number(4))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._path}: the alignment {alignment!r} makes no sense")
        start = -(-self._at // alignment) * alignment
        return metadata, {
            name: self._tensor(name, shape, kind, start + offset)
            for name, shape, kind, offset in infos
        }

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number(10) for _ in range(dimensions))[::-1]
        return name, shape, self._number(4), self._number(10)

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{self._path}: the tensor {name!r} is stored as type {number}, "
                "which is unknown here"
            ) from error
        if shape[-1] % block:
            raise ModelError(
                f"{self._path}: the tensor {name!r} has rows of {shape[-1]} values, "
                f"no multiple of the {block} of {kind.name}"
            )
        return GgufTensor(shape, kind, offset, prod(shape) // block * block_bytes)

    def _value(self, kind: int) -> _Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item_kind, count = self._number(4), self._number(10)
        if item_kind == _STRING:
            return [self._string() for _ in range(count)]
        item = self._struct(item_kind)
        raw = self._take(item.size * count)
        return [value for (value,) in item.iter_unpack(raw)]

    def _scalar(self, kind: int) -> int | float | bool:
        item = self._struct(kind)
        (value,) = item.unpack(self._take(item.size))
        return value

    def _number(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _string(self) -> str:
        raw = self._take(self._number(10))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: a text in the header is not UTF-8") from error

    def _struct(self, kind: int) -> struct.Struct:
        found = _SCALARS.get(kind)
        if found is None:
            raise ModelError(f"{self._path}: the header holds a value of unknown type {kind}")
        return found

    def _take(self, size_bytes: int) -> bytes:
        end = self._at + size_bytes
        if end > len(self._data):
            raise ModelError(f"{self._path}: is truncated: it ends inside its header")
        raw = self._data[self._at : end]
        self._at = end
        return raw
