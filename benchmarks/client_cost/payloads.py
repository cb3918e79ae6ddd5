"""The stub's fixed result payloads, written with a few lines of protobuf by hand.

Neither SDK is imported, so neither can influence what the other is fed.
"""

from __future__ import annotations

import struct

FLOAT32 = 1
STOP_LENGTH = 1


def varint(value: int) -> bytes:
    """`value` as a protobuf base-128 integer."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """An integer or enum field."""
    return varint(field << 3) + varint(value)


def blob(field: int, value: bytes) -> bytes:
    """A bytes, string or message field."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def double(field: int, value: float) -> bytes:
    """A double field."""
    return varint(field << 3 | 1) + struct.pack("<d", value)


def floats(count: int) -> bytes:
    """`count` little-endian float32 values between -2 and 0."""
    return struct.pack(f"<{count}f", *(-(i % 97) / 48.5 for i in range(count)))


def sample_response(tokens: int) -> bytes:
    """A `SampleResponse` with one length-stopped sequence and its log-probabilities."""
    ids = struct.pack(f"<{tokens}i", *(1000 + i for i in range(tokens)))
    sequence = number(1, STOP_LENGTH) + blob(2, ids) + blob(3, floats(tokens))
    return blob(1, sequence)


def forward_backward_output(datums: int, tokens: int) -> bytes:
    """A `ForwardBackwardOutput` with `logprobs` of `tokens` values for each datum."""
    offsets = struct.pack(f"<{datums + 1}q", *(4 * tokens * i for i in range(datums + 1)))
    tensor = blob(1, floats(datums * tokens)) + blob(2, offsets) + number(3, FLOAT32)
    record = blob(2, blob(1, b"logprobs") + blob(2, tensor)) + number(3, datums)
    metric = blob(1, b"loss:sum") + double(2, 6.5)
    return blob(1, b"ArrayRecord") + blob(2, record) + blob(3, metric)
