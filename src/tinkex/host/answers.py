"""HTTP connections as uvicorn serves them, with less to send.

uvicorn writes the head of an answer and its body apart. Each is a system call and a packet, and
each wakes the client; for small answers that is most of what sending costs.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Larger bodies are not copied to have them travel with their head.
_ONE_WRITE_BYTES = 64 * 1024


class Joined:
    """A transport that sends what is written in one turn of the loop at once, if it is small."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # Mutable state: what was written first in this turn and waits for more.
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send at the end of the turn, or with the next write."""
        if self._held:
            if len(data) <= _ONE_WRITE_BYTES:
                data = self._held + data
                self._held = b""
            else:
                self._flush()
            self._transport.write(data)
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what is held, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's own on a transport that joins writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn declares it
        super().connection_made(cast("asyncio.Transport", Joined(transport)))
