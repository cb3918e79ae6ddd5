"""Undoes the compression of replies: gzip, deflate and zstd, whole or in pieces."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Protocol

from tinkex.transport.http_connection import BrokenReply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

# No result is larger; a compressed reply that grows beyond it is an attack or damaged.
MAX_BODY_BYTES = 2 * 1024**3


class _Decoder(Protocol):
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...

    @property
    def eof(self) -> bool: ...


def decode_body(encoding: str, body: bytes, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The plain body; raises BrokenReply for a damaged, cut, oversized or unknown one."""
    for decoder in _decoders(encoding):
        if not body:
            return body
        try:
            body = decoder.decompress(body, max_bytes + 1)
        except Exception as error:  # each library has an error of its own
            raise BrokenReply(f"its {encoding} compression is damaged ({error})") from error
        if len(body) > max_bytes:
            raise BrokenReply(f"it is larger than {max_bytes} bytes")
        if not decoder.eof:
            raise BrokenReply(f"its {encoding} compression is cut short")
    return body


async def decode_chunks(
    encoding: str | None, chunks: AsyncIterable[bytes]
) -> AsyncGenerator[bytes]:
    """The plain body of a streamed reply."""
    decoders = _decoders(encoding) if encoding else []
    async for chunk in chunks:
        piece = chunk
        for decoder in decoders:
            try:
                piece = decoder.decompress(piece)
            except Exception as error:  # each library has an error of its own
                raise BrokenReply(f"its {encoding} compression is damaged ({error})") from error
        if piece:
            yield piece


def _decoders(encoding: str) -> list[_Decoder]:
    """One decoder per layer, outermost first."""
    names = [name.strip().lower() for name in encoding.split(",")]
    return [_decoder(name) for name in reversed(names) if name not in ("", "identity")]


def _decoder(name: str) -> _Decoder:
    match name:
        case "gzip" | "x-gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        case "deflate":
            return zlib.decompressobj()
        case "zstd":
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                from backports import zstd
            return zstd.ZstdDecompressor()
        case _:
            raise BrokenReply(f"it is compressed with {name!r}, which was not offered")
