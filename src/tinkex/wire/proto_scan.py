"""What a protobuf body holds, found before it is parsed.

Two bytes of protobuf can be an empty message or two dimensions of a tensor, and parsed they take
thirty times that. A body within its limit could still fill the memory, and the parser lets no other
thread run meanwhile. Only tags and lengths are read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import InputError
from tinkex.types.bounds import ID_CHARACTERS, LISTS, TENSOR_DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# The members of a training request, a datum, an entry of its map, and a tensor: see tinkex.proto.
_DATA, _CHUNKS, _LOSS_INPUTS, _NAME, _VALUE, _SHAPE = 3, 1, 2, 1, 2, 4
_TEXT, _TOKENS = 1, 1
_TOKEN_BYTES = 4
# A dimension takes ten bytes at most.
_SHAPE_BYTES = 10 * TENSOR_DIMENSIONS


def count_parts(data: bytes, most: int) -> int:
    """The fields of a message and of the messages directly in it; stops above `most`."""
    count = 0
    for _, start, end in _fields(data, 0, len(data)):
        count += 1
        for _ in _fields(data, start, end):
            count += 1
            if count > most:
                return count
        if count > most:
            return count
    return count


def without_data(data: bytes) -> bytes:
    """A training request without its datums; raises InputError where it cannot be read."""
    kept: list[bytes] = []
    at = 0
    for number, _, end in _fields(data, 0, len(data)):
        if number != _DATA:
            kept.append(data[at:end])
        at = end
    if at != len(data):
        raise InputError("the body is not a valid ForwardBackwardRequest")
    return b"".join(kept)


def check_shapes(data: bytes) -> None:
    """Raise InputError if a tensor of a training request has too many dimensions, or text tokens.

    A list of tokens is made in one step, which lets no other thread run.
    """
    index = 0
    for number, start, end in _fields(data, 0, len(data)):
        if number == _DATA:
            chunk = 0
            for kind, first, last in _fields(data, start, end):
                if kind == _LOSS_INPUTS:
                    _check_entry(data, first, last, index)
                elif kind == _CHUNKS:
                    if last - first > _TOKEN_BYTES * LISTS["tokens"]:
                        _check_tokens(
                            data, first, last, f"data[{index}].model_input.chunks[{chunk}]"
                        )
                    chunk += 1
            index += 1


def _check_tokens(data: bytes, start: int, end: int, path: str) -> None:
    most = LISTS["tokens"]
    for kind, first, last in _fields(data, start, end):
        if kind == _TEXT:
            for number, begin, stop in _fields(data, first, last):
                if number == _TOKENS and stop - begin > _TOKEN_BYTES * most:
                    raise InputError(f"a chunk may have {most} tokens", f"{path}.tokens")


def _check_entry(data: bytes, start: int, end: int, index: int) -> None:
    """Look at one tensor and its name."""
    name, size = b"", 0
    for number, first, last in _fields(data, start, end):
        if number == _NAME:
            name = data[first : min(last, first + ID_CHARACTERS)]
        elif number == _VALUE:
            for kind, begin, stop in _fields(data, first, last):
                if kind == _SHAPE:
                    size += max(stop - begin, 1)
    if size > _SHAPE_BYTES:
        path = f'data[{index}].loss_fn_inputs["{name.decode(errors="replace")}"]'
        raise InputError(f"a tensor may have {TENSOR_DIMENSIONS} dimensions", path)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number and content of each field, without the content of numbers. Ends at malformed bytes."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at, end)
            start, at = at, at + size
        elif kind == _VARINT:
            _, at = _varint(data, at, end)
            start = at
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            start = at
        else:
            return
        if at > end:
            return
        yield tag >> 3, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        if shift > 63:
            break
        shift += 7
    # Cut off, or too long: beyond the end.
    return value, end + 1
