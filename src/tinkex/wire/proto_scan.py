"""How many parts a message has, found before it is parsed.

Two bytes of protobuf can be an empty message, and parsed it takes thirty times that, so a body
within its limit could still fill the memory. Only tags and lengths are read here; malformed
bytes are left to the parser, which refuses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def has_more_parts(data: bytes, most: int) -> bool:
    """Whether a message and the messages directly in it have more than `most` fields."""
    count = 0
    for start, end in _fields(data, 0, len(data)):
        count += 1
        for _ in _fields(data, start, end):
            count += 1
            if count > most:
                return True
        if count > most:
            return True
    return False


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the content of each field lies; nothing for numbers. Ends at malformed bytes."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at, end)
            yield at, min(at + size, end)
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at, end)
            yield at, at
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            yield at, at
        else:
            return


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7
    return value, end
