"""Zstandard bodies: one frame, its content size in the header.

Decompression handles untrusted bytes, so its memory is bounded before the work starts and while it
runs.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from tinkex.errors import InputError

if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd

# A frame may demand a window this large of its reader (2**27 bytes), which is what the
# reference decoder allows by default; anything above is an attack or a mistake.
_MAX_WINDOW_LOG = 27

PIECE_BYTES = 1 << 17
"""How much is unpacked at a time, which fits a processor's cache.

The library copies what one call returns while it holds the interpreter's lock: with 60 MB, all
other threads and the event loop would wait for 50 ms and more.
"""


def compress(data: bytes) -> bytes:
    """One frame at the default level."""
    return zstd.compress(data)


def content_bytes(data: bytes) -> int | None:
    """How much the header of a frame says it holds; None where it does not say it."""
    try:
        return zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError:
        return None


def decompress(data: bytes, max_bytes: int) -> bytes:
    """The content of one frame; raises InputError when it is not one or holds over `max_bytes`."""
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    decompressor = zstd.ZstdDecompressor(options=options)
    try:
        _check_declared_size(data, max_bytes)
        content = _content(decompressor, data, max_bytes)
    except zstd.ZstdError as error:
        raise InputError(f"the body is not valid zstd: {error}") from error
    if len(content) > max_bytes:
        raise InputError(_too_large(max_bytes))
    if not decompressor.eof:
        raise InputError("the zstd body is truncated")
    if decompressor.unused_data:
        raise InputError("the zstd body continues after its first frame")
    return content


def _content(decompressor: zstd.ZstdDecompressor, data: bytes, max_bytes: int) -> bytes:
    """What a frame holds, as far as it goes, or one byte more than allowed if it holds more."""
    piece = decompressor.decompress(data, max_length=min(PIECE_BYTES, max_bytes + 1))
    if decompressor.eof or len(piece) > max_bytes:
        return piece
    # A `BytesIO` grows without copying and returns its content without copying.
    whole = io.BytesIO()
    whole.write(piece)
    while not decompressor.eof and not decompressor.needs_input:
        left = max_bytes + 1 - whole.tell()
        if left <= 0:
            break
        whole.write(decompressor.decompress(b"", max_length=min(PIECE_BYTES, left)))
    return whole.getvalue()


def _check_declared_size(data: bytes, max_bytes: int) -> None:
    # A frame may leave its size out (None, whatever the stub says); reading it is bounded too.
    if (zstd.get_frame_info(data).decompressed_size or 0) > max_bytes:
        raise InputError(_too_large(max_bytes))


def _too_large(max_bytes: int) -> str:
    return f"the decompressed body is larger than the {max_bytes} bytes allowed"
