"""The header of a safetensors file, parsed here because the library would trust it.

A file is the length of its header, the header (JSON: name, type, shape and offsets of each tensor),
and the data, one tensor after another. Files are untrusted, so everything that a reader relies on
is checked: no overlap, no gap, nothing beyond the end, sizes that fit the shapes.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from tinkex.adapters.peft_layout import WEIGHTS_FILE
from tinkex.errors import InputError, quoted, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import IO

LENGTH: Final = struct.Struct("<Q")
MAX_HEAD_BYTES: Final = 2 << 20
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_MOST_DIMENSIONS: Final = 8
_METADATA: Final = "__metadata__"


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its type as the format names it, its shape, and the offsets of its data."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def head_length(first: bytes, size_bytes: int) -> int:
    """The length of the head, from the first eight bytes of a file of this size."""
    if len(first) < LENGTH.size:
        raise _bad(f"has {len(first)} bytes, which is no safetensors file")
    (length,) = LENGTH.unpack(first)
    if not 2 <= length <= MAX_HEAD_BYTES:
        raise _bad(f"is no safetensors file, or its head is longer than {MAX_HEAD_BYTES} bytes")
    missing = LENGTH.size + length - size_bytes
    if missing > 0:
        raise _bad(f"is cut off in its head: {missing} of {length} bytes are missing")
    return length


def parse_head(head: bytes, data_bytes: int) -> dict[str, TensorInfo]:
    """The tensors by name, of a file with `data_bytes` bytes after its head."""
    try:
        raw = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        tensors = {name: msgspec.json.decode(item, type=TensorInfo) for name, item in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"has a damaged head: {shortened(str(error))}") from error
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        at = _end_of(name, tensor, at)
    if at > data_bytes:
        raise _bad(f"is cut off: {at - data_bytes} of {at} bytes are missing")
    if at < data_bytes:
        raise _bad(f"has {data_bytes - at} bytes that belong to no tensor")
    return tensors


def _end_of(name: str, tensor: TensorInfo, at: int) -> int:
    """Where a tensor ends that must begin at `at`."""
    item_bytes = _ITEM_BYTES.get(tensor.dtype)
    if item_bytes is None:
        known = ", ".join(_ITEM_BYTES)
        stored = shortened(tensor.dtype)
        raise _bad(f"{shortened(name)} is stored as {stored}; an adapter may be {known}")
    if len(tensor.shape) > _MOST_DIMENSIONS or any(size < 1 for size in tensor.shape):
        raise _bad(f"{shortened(name)} has shape {quoted(tensor.shape)}")
    start, end = tensor.data_offsets
    if start != at or end - start != tensor.count * item_bytes:
        raise _bad(f"{shortened(name)} does not lie where its shape says; the file is damaged")
    return end


def read_head(file: IO[bytes], size_bytes: int) -> tuple[bytes, dict[str, TensorInfo]]:
    """The head as it is written, and what it says, of an open file; leaves it at the data."""
    length = head_length(file.read(LENGTH.size), size_bytes)
    head = file.read(length)
    return head, parse_head(head, size_bytes - LENGTH.size - length)


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """What the head of a file says."""
    with path.open("rb") as file:
        return read_head(file, path.stat().st_size)[1]


def rename_tensors(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Write a file with the same data under other names; its metadata says PyTorch."""
    size = source.stat().st_size
    with source.open("rb") as read, target.open("wb") as written:
        _, tensors = read_head(read, size)
        head: dict[str, object] = {_METADATA: {"format": "pt"}}
        head |= {names[name]: tensor for name, tensor in tensors.items()}
        packed = msgspec.json.encode(head)
        packed += b" " * (-len(packed) % LENGTH.size)  # data begins at a multiple of eight
        written.write(LENGTH.pack(len(packed)) + packed)
        while block := read.read(1 << 20):
            written.write(block)


def _bad(reason: str) -> InputError:
    return InputError(reason, WEIGHTS_FILE)
