"""Model inputs: text, image and audio chunks, and the prompt they form."""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from msgspec import ValidationError, convert
from msgspec.structs import replace

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.arrays import is_numpy, is_torch, plain_number, to_array
from tinkex.types.value import Count, Request, Token

ImageFormat = Literal["png", "jpeg"]


class EncodedTextChunk(Request, tag_field="type", tag="encoded_text"):
    """Token ids."""

    tokens: Sequence[Token]
    if TYPE_CHECKING:
        type: Literal["encoded_text"] = "encoded_text"

    @classmethod
    def __adapt__(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "tokens" in fields:
            fields["tokens"] = token_list(fields["tokens"], "EncodedTextChunk.tokens")
        return fields

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def packed(self, path: str = "tokens") -> bytes:
        """The ids as little-endian 32-bit integers; `path` names them if they are none."""
        import numpy as np

        ids = self.tokens
        if not isinstance(ids, array):  # else made by `copy_input`
            try:
                # Twice as fast as an array made from the same list.
                packed = _packer(len(ids)).pack(*ids)
                seen = np.frombuffer(packed, "<u4")
                if not seen.size or seen.item(seen.argmax()) < 2**31:
                    return packed
            except (TypeError, struct.error):
                pass
            ids = token_list(ids, path)
        return np.asarray(ids, "<u4").tobytes()


@lru_cache(1024)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


class ImageChunk(Request, tag_field="type", tag="image"):
    """An image inside the request; `data` may be given as base64 text."""

    data: bytes
    format: ImageFormat
    expected_tokens: Count | None = None
    if TYPE_CHECKING:
        type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        """`expected_tokens`; raises `InputError` when that is not set."""
        return _expected(self.expected_tokens, "ImageChunk")

    def __repr__(self) -> str:
        return self._repr_with(data=f"<{len(self.data)} bytes>")


class ImageAssetPointerChunk(Request, tag_field="type", tag="image_asset_pointer"):
    """An image the server can find at `location`; for sampling only."""

    format: ImageFormat
    location: str
    expected_tokens: Count | None = None
    if TYPE_CHECKING:
        type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """`expected_tokens`; raises `InputError` when that is not set."""
        return _expected(self.expected_tokens, "ImageAssetPointerChunk")


class DmelChunk(Request, tag_field="type", tag="dmel"):
    """Audio as a serialized tensor; may be given as base64 text."""

    dmel: bytes
    if TYPE_CHECKING:
        type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The tensor's first dimension, read from its header."""
        return _first_dimension(self.dmel)

    def __repr__(self) -> str:
        return self._repr_with(dmel=f"<{len(self.dmel)} bytes>")


def _expected(tokens: int | None, kind: str) -> int:
    if tokens is None:
        raise InputError(
            "set it: only the server knows how many tokens this image becomes",
            f"{kind}.expected_tokens",
        )
    return tokens


_CONSTANT_TENSOR = 254
_LAST_DTYPE = 7


def _first_dimension(data: bytes) -> int:
    """Read the header: optional marker byte, dtype byte, then varints rank and dimensions."""
    at = 1 if data[:1] == bytes([_CONSTANT_TENSOR]) else 0
    if len(data) <= at or data[at] > _LAST_DTYPE:
        raise InputError("not a serialized tensor", "DmelChunk.dmel")
    rank, at = _varint(data, at + 1)
    if rank == 0:
        raise InputError("the tensor has no dimensions", "DmelChunk.dmel")
    return _varint(data, at)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise InputError("the tensor header is cut short", "DmelChunk.dmel")


ModelInputChunk = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk
"""Any chunk."""


class ModelInput(Request):
    """A prompt: chunks of tokens, images and audio, in order."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: "Sequence[int] | Any") -> Self:
        """One text chunk of these token ids: a list, tuple, range, or 1-D numpy or torch array."""
        if tokens.__class__ is list or tokens.__class__ is tuple:
            try:
                return convert({"chunks": [{"type": "encoded_text", "tokens": tokens}]}, cls)
            except ValidationError:
                pass  # `token_list` accepts numpy scalars and explains the rest
        ids = token_list(tokens, "tokens")
        return convert({"chunks": [{"type": "encoded_text", "tokens": ids}]}, cls)

    @classmethod
    def empty(cls) -> Self:
        """No chunks at all."""
        return cls(chunks=[])

    @property
    def length(self) -> int:
        """Length in tokens; raises `InputError` for an image without `expected_tokens`."""
        return sum(chunk.length for chunk in self.chunks)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        # An input stays true when it is empty, as it was before it had a length.
        return True

    def to_ints(self) -> list[int]:
        """All token ids; raises `InputError` when a chunk is not text."""
        ids: list[int] = []
        for i, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise InputError(
                    f"{type(chunk).__name__} has no token ids", f"ModelInput.chunks[{i}]"
                )
            ids.extend(chunk.tokens)
        return ids

    def append(self, chunk: ModelInputChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more chunk of one token."""
        return self.append(EncodedTextChunk(tokens=[token]))


def copy_input(value: ModelInput, path: str, *, pack: bool = False) -> ModelInput:
    """A copy that does not change when the caller changes the lists inside `value`.

    Token ids are Python numbers in it, as the JSON encoder wants them. With `pack` they are an
    array of 32-bit integers, as protobuf does. Raises `InputError` for what cannot be sent.
    """
    chunks: list[ModelInputChunk] = []
    for i, chunk in enumerate(value.chunks):
        if isinstance(chunk, EncodedTextChunk):
            ids = _compact(chunk, f"{path}.chunks[{i}].tokens") if pack else tuple(chunk.tokens)
            chunks.append(replace(chunk, tokens=ids))
        elif isinstance(chunk, ImageChunk | ImageAssetPointerChunk | DmelChunk):  # pyright: ignore[reportUnnecessaryIsInstance] -- anything can be put into a list
            chunks.append(chunk)
        else:
            kind = type(cast("Any", chunk)).__name__
            raise InputTypeError(f"expected a chunk, got {kind}", f"{path}.chunks[{i}]")
    return replace(value, chunks=chunks)


def _compact(chunk: EncodedTextChunk, path: str) -> Sequence[int]:
    ids = array("I", chunk.packed(path))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids or ()


def token_list(tokens: Any, path: str) -> list[int]:
    """Token ids as a list of `int`, checked one by one; errors name `path[i]`."""
    if is_torch(tokens) or is_numpy(tokens):
        ids = _from_array(tokens, path)
    elif isinstance(tokens, str | bytes | bytearray | set | frozenset | dict):
        raise InputTypeError(f"expected token ids, got {type(cast('Any', tokens)).__name__}", path)
    elif isinstance(tokens, Sequence | array):
        ids = [_token(token, f"{path}[{i}]") for i, token in enumerate(cast("list[Any]", tokens))]
    else:
        raise InputTypeError(f"expected a list of token ids, got {type(tokens).__name__}", path)
    for i, token in enumerate(ids):
        if not 0 <= token < 2**31:
            raise InputError(f"token ids are between 0 and 2**31 - 1, got {token}", f"{path}[{i}]")
    return ids


def _from_array(tokens: Any, path: str) -> list[int]:
    ids = to_array(tokens, None, path)
    if "bool" in str(tokens.dtype):
        raise InputTypeError("expected token ids, got bools", path)
    if ids.ndim != 1:
        raise InputError(f"expected one dimension, got shape {list(ids.shape)}", path)
    return cast("list[int]", to_array(ids, "int64", path).tolist())


def _token(token: Any, path: str) -> int:
    token = plain_number(token)
    if isinstance(token, float) and token.is_integer():
        token = int(token)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InputTypeError(
            f"expected a token id, got {type(token).__name__} {quoted(token)}", path
        )
    return int(token)
