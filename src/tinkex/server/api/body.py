"""Reading a request's body within limits: its size, also decompressed and decoded, and its time.

Bodies come from strangers. What is too large is refused before it is read where the request
says so, else as soon as it shows; what is too slow is given up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from tinkex.server.api.errors import refuse
from tinkex.server.observe.seen import seen_by
from tinkex.wire.compression import decompress
from tinkex.wire.proto_scan import has_more_parts
from tinkex.wire.routes import ASAMPLE, FORWARD, FORWARD_BACKWARD, MEDIA_PROTOBUF, TELEMETRY

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.requests import Request

    from tinkex.clock import Clock
    from tinkex.server.settings import Settings

_LARGE_ROUTES = frozenset(route.name for route in (FORWARD_BACKWARD, FORWARD, ASAMPLE, TELEMETRY))
# Above this, unpacking would hold up everybody else's heartbeat noticeably.
_LARGE_BYTES = 1 << 20
# Decoded, `[[],[],…]` takes twenty times its bytes and empty protobuf messages thirty times. A
# datum has about four parts in protobuf and fifteen in JSON, so these are 16,000 datums: many
# times what clients send at once, and about a second of decoding.
MAX_PROTOBUF_PARTS = 1 << 16
MAX_JSON_PARTS = 1 << 18


async def read_body(request: Request, settings: Settings, uploads: Uploads) -> bytes:
    """The body, decompressed; raises 408, 413, 415, or an InputError for a bad frame."""
    most, most_decoded = _limits(request, settings)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise refuse(415, f"Content-Encoding {encoding!r} is not understood; use zstd or none.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    body = await uploads.within_limit(_receive(request, most))
    if encoding == "zstd":
        body = await _unpacked(body, most_decoded)
    _check_parts(body, request.headers.get("content-type", ""))
    return body


def _limits(request: Request, settings: Settings) -> tuple[int, int]:
    if seen_by(request.scope).route in _LARGE_ROUTES:
        return settings.max_body_bytes, settings.max_decoded_bytes
    small = min(settings.max_small_body_bytes, settings.max_body_bytes)
    return small, small


async def _receive(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


async def _unpacked(body: bytes, most: int) -> bytes:
    if len(body) < _LARGE_BYTES:
        return decompress(body, most)
    return await anyio.to_thread.run_sync(decompress, body, most)


def _check_parts(body: bytes, content_type: str) -> None:
    if content_type.startswith(MEDIA_PROTOBUF):
        if has_more_parts(body, MAX_PROTOBUF_PARTS):
            raise refuse(413, f"A body may have {MAX_PROTOBUF_PARTS} parts; send fewer datums.")
    elif body.count(b"[") + body.count(b"{") > MAX_JSON_PARTS:
        raise refuse(413, f"A body may have {MAX_JSON_PARTS} lists and objects; send less at once.")


def _too_large(most: int) -> Exception:
    return refuse(413, f"A body may have {most} bytes here; send less at once.")


class Uploads:
    """Gives up bodies that do not arrive in time. `run()` is its one long-lived task.

    One watcher for all of them: a timer for each request would cost more than most requests.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        # Mutable state: the bodies being read, oldest first, and the watcher's wake-up.
        self._open: dict[asyncio.Timeout, float] = {}
        self._bell = anyio.Event()

    async def within_limit(self, reading: Awaitable[bytes]) -> bytes:
        """What is read; raises a 408 when that takes longer than the limit."""
        limit = asyncio.timeout(None)
        self._open[limit] = self._clock.now() + self._limit_s
        self._bell.set()
        try:
            async with limit:
                return await reading
        except TimeoutError:
            if not limit.expired():
                raise
            detail = f"The body did not arrive within {self._limit_s:g} s; send it again."
            raise refuse(408, detail) from None
        finally:
            del self._open[limit]

    async def run(self) -> None:
        """Watch until cancelled; asleep while nothing is being read."""
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            while self._open:
                await self._clock.sleep(next(iter(self._open.values())) - self._clock.now())
                self._give_up_late()

    def _give_up_late(self) -> None:
        now = self._clock.now()
        for limit, deadline in self._open.items():
            if deadline <= now and not limit.expired():
                limit.reschedule(0)  # long ago
