"""Sending something large, or the part of it that was asked for, piece by piece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.datastructures import Headers

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Source(Protocol):
    """Bytes that do not change."""

    @property
    def size_bytes(self) -> int: ...
    async def read(self, start: int, count: int) -> bytes: ...
    def close(self) -> None: ...


def send(
    headers: Headers, source: Source, media_type: str, etag: str, *, stable: bool = True
) -> Response:
    """The reply to a GET; the source is closed when it was sent.

    A range that is not understood, or of something that has changed, is answered by the whole, as
    the standard says. What is not `stable` is another file each time it is made: a part of it is
    sent only to a client that says which one it has (If-Range).
    """
    size = source.size_bytes
    told = {"accept-ranges": "bytes", "etag": f'"{etag}"'}
    wanted = headers.get("range")
    known = headers.get("if-range", f'"{etag}"' if stable else None)
    if wanted is None or known != f'"{etag}"':
        part: range | None = range(size)
    else:
        part = _part(wanted, size)
    if part is None:
        source.close()
        told["content-range"] = f"bytes */{size}"
        return Response(status_code=416, headers=told)
    told["content-length"] = str(len(part))
    partial = len(part) < size
    if partial:
        told["content-range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    return StreamingResponse(
        _pieces(source, part), 206 if partial else 200, told, media_type=media_type
    )


def _part(wanted: str, size: int) -> range | None:
    """The bytes a Range header means; None when there are none such."""
    found = _RANGE.fullmatch(wanted.strip().replace(" ", ""))
    if found is None or not any(found.groups()):
        return range(size)
    first, last = found.groups()
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    return range(start, stop) if start < stop else None


async def _pieces(source: Source, part: range) -> AsyncGenerator[bytes]:
    try:
        for start in range(part.start, part.stop, _PIECE_BYTES):
            yield await source.read(start, min(_PIECE_BYTES, part.stop - start))
    finally:
        source.close()
