"""Server-sent events, and knowing when nobody reads them any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import Message, Receive, Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family collect an answer before they pass it on, unless told.
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """The way out of a streamed answer. Its head leaves with the first event.

    Until then the request can still fail with a status of its own.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # Mutable state: whether the head has left.
        self.started = False

    async def put(self, events: Iterable[dict[str, Any]]) -> None:
        """Send events, all in one piece."""
        await self._write(b"".join(map(_encoded, events)))

    async def end(self) -> None:
        """Send the last event there is."""
        await self._write(_DONE, more=False)

    async def fail(self, event: dict[str, Any]) -> None:
        """End with an error in place of the rest; without the usual last event."""
        await self._write(_encoded(event), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._pass({"type": "http.response.body", "body": data, "more_body": more})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how some servers say that nobody is there
            raise ClientDisconnect from error


def _encoded(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Do the work, unless the caller goes away first; says whether it was done.

    The request's body must have been read: whatever comes after it is its end.
    """
    failure: Exception | None = None
    done = False

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        try:
            await work()
            done = True
        except Exception as error:  # noqa: BLE001 - raised below, without a group around it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return done
