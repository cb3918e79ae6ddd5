"""Messages over one end of a socket pair, on an asyncio loop. Both processes use it.

Sending never waits: what the socket does not take yet stays in memory, and every byte that
arrives counts as a sign of life, so a large answer under way is as good as a heartbeat.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from tinkex.engine.process.messages import HEADER, decode, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tinkex.engine.process.messages import Message


class Channel(asyncio.BufferedProtocol):
    """One end. `on_message` gets what arrives; `on_lost` is called once, at the end.

    It gets what was wrong with a message, or None when the other end went away.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        # Mutable state: what is being filled (a header or a body) and how far; whether anything
        # came since the last look; what was wrong with a message; what waits for everything to
        # be sent.
        self._header = memoryview(bytearray(HEADER.size))
        self._target = self._header
        self._filled = 0
        self._heard = True
        self._error: Exception | None = None
        self._sent = asyncio.Event()
        self._sent.set()
        self._transport: asyncio.Transport | None = None

    def heard(self) -> bool:
        """Whether anything has arrived since this was asked last."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, message: Message) -> None:
        """Send; without a connection it goes nowhere, as `on_lost` says by itself."""
        framed = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed)

    async def drained(self) -> None:
        """Return when everything was handed to the socket, or the connection is gone."""
        await self._sent.wait()

    def abort(self) -> None:
        """End the connection; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    # -- what asyncio calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Have `pause_writing` called for the first byte that waits.
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        full, self._filled = self._target, 0
        try:
            self._target = self._next(full)
        except Exception as error:  # noqa: BLE001 - handed to the owner, by `on_lost`
            self._error = error
            self.abort()

    def _next(self, full: memoryview) -> memoryview:
        """Use what was filled; returns what to fill next."""
        if full is not self._header:
            self._on_message(decode(full))
            return self._header
        (size,) = HEADER.unpack(full)
        if size == 0:
            raise EOFError("a message has no bytes")
        return memoryview(bytearray(size))

    def pause_writing(self) -> None:
        self._sent.clear()

    def resume_writing(self) -> None:
        self._sent.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sent.set()
        self._on_lost(self._error)


async def open_channel(
    end: socket.socket,
    on_message: Callable[[Message], None],
    on_lost: Callable[[Exception | None], None],
) -> Channel:
    """Take over one end of a socket pair."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(lambda: Channel(on_message, on_lost), sock=end)
    return channel
