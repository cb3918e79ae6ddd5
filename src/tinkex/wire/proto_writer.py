"""The bodies of training batches, written without protobuf's message objects.

A batch is megabytes of numbers inside a few small messages. Message objects copy those numbers
several times on their way in and out; here the pieces of a body are collected in order and
each array is copied once, when they are joined. What is small and rare (provenance, details of
pictures) is still left to protobuf: the bytes of a message are its fields in a row, so what
protobuf made of some of them can be appended to the others.

The result is byte for byte protobuf's own deterministic serialization: fields in the order of
their numbers, map entries in the order of their keys, defaults left out. The field numbers are
those of `proto/tinkex.proto`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tinkex.errors import InputError
from tinkex.types import DmelChunk, EncodedTextChunk, ImageChunk, PromptProvenanceSpan
from tinkex.wire.values import NATIVE, dtype_code, little_endian

if TYPE_CHECKING:
    from tinkex.types import Datum, ModelInputChunk, TensorData, TensorDtype

    # Joined in the end; an array takes part as the memory it already has.
    Piece = bytes | memoryview

_INT32_MAX = (1 << 31) - 1
# A batch has few distinct lengths and shapes. Where all differ, remembering costs little.
_REMEMBERED = 1024


def write_datum(pieces: list[Piece], datum: Datum, path: str) -> None:
    """Append a datum as it stands in `ForwardBackwardRequest.data`."""
    head = len(pieces)
    pieces.append(b"")  # its length is known last
    size = 0
    for index, chunk in enumerate(datum.model_input.chunks):
        size += _write_chunk(pieces, chunk, path, index)
    inputs = datum.loss_fn_inputs
    for name in sorted(inputs):
        size += _write_input(pieces, name, inputs[name])
    if datum.model_input_spans or datum.loss_fn_input_spans:
        provenance = _provenance(datum)
        pieces.append(provenance)
        size += len(provenance)
    pieces[head] = _head(3, size)


def _write_chunk(pieces: list[Piece], chunk: ModelInputChunk, path: str, index: int) -> int:
    """Append a chunk as it stands in `Datum.model_input`; how many bytes that makes."""
    if isinstance(chunk, EncodedTextChunk):
        tokens = chunk.packed(f"{path}.model_input.chunks[{index}].tokens")
        before = _before_tokens(len(tokens))
        pieces += (before, tokens)
        return len(before) + len(tokens)
    if isinstance(chunk, ImageChunk):
        parts = _message(2, _image(chunk, f"{path}.model_input.chunks[{index}]"))
    elif isinstance(chunk, DmelChunk):
        parts = _message(3, _bytes(1, chunk.dmel))
    else:
        raise InputError(
            f"{type(chunk).__name__} cannot be used for training; pass the picture itself "
            "as an ImageChunk",
            f"{path}.model_input.chunks[{index}]",
        )
    parts = _message(1, parts)
    pieces += parts
    return sum(map(len, parts))


def _write_input(pieces: list[Piece], name: str, tensor: TensorData) -> int:
    """Append an entry of `Datum.loss_fn_inputs`; how many bytes that makes."""
    # The storage itself: the public properties would make lists of it.
    values, crow, col = tensor._numpy, tensor._crow, tensor._col  # pyright: ignore[reportPrivateUsage]
    shape = tensor._shape or ()  # pyright: ignore[reportPrivateUsage]
    if crow is None or col is None:
        before, after = _around_dense(name, tensor.dtype, shape, values.nbytes)
        if not NATIVE:
            values = little_endian(values)
        pieces += (before, values.data, after)
        return len(before) + values.nbytes + len(after)
    csr = [
        part
        for number, array in enumerate((values, crow, col), start=1)
        for part in _bytes(number, little_endian(array).tobytes())
    ]
    parts = [*_message(2, csr), _layout(tensor.dtype, shape)]
    parts = _message(2, [*_key(name), *_message(2, parts)])
    pieces += parts
    return sum(map(len, parts))


@lru_cache(_REMEMBERED)
def _before_tokens(size: int) -> bytes:
    """What precedes the packed ids of a text chunk, down from `Datum.model_input`."""
    tokens = _head(1, size) if size else b""
    text = _head(1, len(tokens) + size)
    return _head(1, len(text) + len(tokens) + size) + text + tokens


@lru_cache(_REMEMBERED)
def _around_dense(
    name: str, dtype: TensorDtype, shape: tuple[int, ...], size: int
) -> tuple[bytes, bytes]:
    """What precedes and follows the numbers of a dense tensor in `Datum.loss_fn_inputs`."""
    # Part of a oneof, so it is written even when there are no numbers.
    dense, layout = _head(1, size), _layout(dtype, shape)
    tensor = len(dense) + size + len(layout)
    entry = b"".join(_key(name)) + _head(2, tensor)
    return _head(2, len(entry) + tensor) + entry + dense, layout


def _layout(dtype: TensorDtype, shape: tuple[int, ...]) -> bytes:
    """`Tensor.dtype` and `Tensor.shape`."""
    sizes = b"".join(map(_varint, shape))
    return b"\x18" + _varint(dtype_code(dtype)) + b"".join(_bytes(4, sizes))


def _image(chunk: ImageChunk, path: str) -> list[bytes]:
    from tinkex.wire import tinkex_pb2 as pb

    if chunk.expected_tokens is not None and chunk.expected_tokens > _INT32_MAX:
        raise InputError(f"must be at most {_INT32_MAX}", f"{path}.expected_tokens")
    details = pb.ImageChunk(format=chunk.format, expected_tokens=chunk.expected_tokens)
    return [*_bytes(1, chunk.data), details.SerializeToString()]


def _provenance(datum: Datum) -> bytes:
    from tinkex.wire import tinkex_pb2 as pb

    message = pb.Datum()
    for messages, spans in (
        (message.model_input_spans, datum.model_input_spans),
        (message.loss_fn_input_spans, datum.loss_fn_input_spans),
    ):
        for span in spans or ():
            added = messages.add()
            prompt = isinstance(span, PromptProvenanceSpan)
            target = added.prompt_tokens if prompt else added.sampled_tokens
            target.sequence_id = span.sequence_id
            target.offset = span.offset
            target.length = span.length
    return message.SerializeToString()


def _key(name: str) -> list[bytes]:
    text = name.encode()
    # A map entry has its key even when that is empty.
    return [_head(1, len(text)), text]


def _bytes(number: int, value: bytes) -> list[bytes]:
    """A bytes field, or nothing at all when it is empty."""
    return [_head(number, len(value)), value] if value else []


def _message(number: int, parts: list[bytes]) -> list[bytes]:
    """A field that holds a message made of these parts."""
    return [_head(number, sum(map(len, parts))), *parts]


@lru_cache(_REMEMBERED)
def _head(number: int, size: int) -> bytes:
    """The tag and length of a field that is bytes, text, packed numbers or a message."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
