"""One connection: uvicorn's HTTP protocol with limits on heads, and with deadlines.

httptools joins the pieces of a header that comes in many reads, which takes quadratic time, and
hands it over only when it is complete. So bytes are counted before they are parsed. Everything else
is uvicorn's: only callbacks of asyncio and httptools are overridden, `send_400_response`, and
`on_response_complete`, which says that a connection is idle again.
"""

from __future__ import annotations

import math
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.server.cluster.hop import OF_NODE
from tinkex.serving.connections import site_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from tinkex.serving.connections import Connections, Reason, Verdict

_RETRY_AFTER_S: Final = 1
# A client that reads less than this in `send_stall_s` does not read.
_PROGRESS_BYTES: Final = 64 << 10
# What a refusal of a request counts as, by its status.
_REASONS: Final[Mapping[int, Reason]] = {
    400: "malformed",
    408: "slow",
    414: "head_size",
    429: "pipelined",
    431: "head_size",
    503: "partial_heads",
}


class _Reading(Enum):
    NOTHING = 0  # no byte of a request yet
    HEAD = 1
    BODY = 2
    DONE = 3  # the request is complete, its answer is not


_NOTHING, _HEAD, _BODY, _DONE = _Reading


class _RefusedError(Exception):
    """Ends the parsing of a request; `send_400_response` then sends the refusal."""


class ServerConnection(HttpToolsProtocol):
    """A connection that counts and is counted."""

    def __init__(self, connections: Connections, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._all = connections
        self._limits = connections.limits
        # Mutable state: where in a request the client is, the bytes since the last one that
        # brought a head, a body or a message to an end or further, the refusal that ends the
        # connection, and the last progress of a client that reads slowly.
        self.site = ""
        self.deadline = math.inf
        self._reading = _NOTHING
        self._fed = 0
        self._partial = 0
        self._refusal: tuple[int, str] | None = None
        self._sent_at, self._unsent = 0.0, 0

    # -- asyncio's callbacks --------------------------------------------------------------------

    def accepted(self, address: str, verdict: Verdict) -> None:
        """Count it from now on, before TLS; `connection_made` follows, or `not_made`."""
        self.site = site_of(address)
        self.deadline = self.loop.time() + self._limits.silent_s
        if verdict != "open":
            most = self._limits
            detail = (
                f"There are too many connections: this server accepts {most.connections}, "
                f"{most.per_address} of them from one address. Close idle ones and try again."
            )
            self._refusal = 503, detail
        self._all.add(self, verdict)

    def not_made(self) -> None:
        """Its TLS handshake failed."""
        self._all.remove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        self.deadline = self.loop.time() + self._limits.silent_s
        if self._refusal is not None:
            self._send_refusal(*self._refusal)
        else:
            self._all.idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_partial()
        self._all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # read and dropped, so that the client gets to read the refusal
        if self._reading is _NOTHING:
            self._reading = _HEAD
            self.deadline = self.loop.time() + self._limits.head_s
            self._all.busy(self)
        elif self._reading is _BODY and not self.cycle.response_complete:
            self.deadline = self.loop.time() + self._limits.body_stall_s
        fed = self._fed + len(data)
        if fed <= self._limits.head_bytes:
            self._fed = fed
            super().data_received(data)
        else:
            self._feed(data)
        if self._reading is _HEAD or self._partial:
            self._count_partial()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sent_at, self._unsent = self.loop.time(), self.transport.get_write_buffer_size()
        self._all.unread(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all.read(self)

    # -- httptools' callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[OF_NODE] = self._of_node
        self._reading = _HEAD  # one request after another in the same bytes

    def on_headers_complete(self) -> None:
        limits = self._limits
        if len(self.url) > limits.target_bytes:
            self._stop_parsing(414, f"A target may have {limits.target_bytes} bytes; send less.")
        if len(self.headers) > limits.headers:
            self._stop_parsing(431, f"A request may have {limits.headers} headers; send fewer.")
        if len(self.pipeline) >= limits.pipelined:
            self._stop_parsing(
                429,
                f"{limits.pipelined} requests may wait on one connection; read the answers first.",
            )
        self._fed = 0
        self._reading = _BODY
        self.deadline = self.loop.time() + limits.body_stall_s
        super().on_headers_complete()
        # The list is the request's now. Fields after a chunked body are not, and are dropped.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fed = 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._become_idle()  # refused before its body had arrived
        else:
            self._reading = _DONE
            self.deadline = math.inf

    # -- uvicorn's callbacks --------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answering:
            return
        if self._refusal is not None:
            self._send_refusal(*self._refusal)
        elif self.transport.is_closing():
            self._reading = _DONE
            self.deadline = self.loop.time() + self._limits.send_stall_s
        elif self._reading is _DONE:
            self._become_idle()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, f"{msg} Send HTTP/1.1.")))

    # -- what `Connections` calls ---------------------------------------------------------------

    def overdue(self, now: float) -> None:
        """Close what is too slow."""
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - before it is made
            self.deadline = math.inf  # the handshake has its own limit
        elif self.transport.is_closing() or self._refusal is not None:
            self.transport.abort()
        elif self._reading is _NOTHING:
            self.deadline = now + self._limits.send_stall_s
            self.transport.close()
        elif self._reading is _HEAD:
            self._overdue_head(now)
        elif self._reading is _BODY:
            self._overdue_body(now)
        else:
            self.deadline = now + self._limits.send_stall_s

    def check_sending(self, now: float) -> None:
        """Abort it if the client reads almost nothing of a large answer."""
        size = self.transport.get_write_buffer_size()
        if size + _PROGRESS_BYTES <= self._unsent:
            self._sent_at, self._unsent = now, size
        elif now - self._sent_at >= self._limits.send_stall_s:
            self._all.refusals["unread"] += 1
            self.transport.abort()

    def close_idle(self) -> None:
        """Close it; no request is lost unless one is on its way."""
        if self.scheme == "https":
            self.transport.abort()  # closing would wait for the client's part of it
        else:
            self.transport.close()

    # -- parts ----------------------------------------------------------------------------------

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _of_node(self) -> None:
        self._all.of_node(self)

    def _become_idle(self) -> None:
        self._reading = _NOTHING
        self.deadline = self.loop.time() + self._limits.idle_s
        self._all.idle(self)

    def _feed(self, data: bytes) -> None:
        """Parse in pieces: never more of a head than there may be.

        What follows a body in the same piece is not counted, so that the limit of fields after a
        chunked body, and of a head after another request, is up to twice as high.
        """
        while data and self._refusal is None and not self.transport.is_closing():
            room = self._limits.head_bytes - self._fed
            if room <= 0:
                most = self._limits.head_bytes
                self._refuse(431, f"The head of a request may have {most} bytes; send less.")
                return
            self._fed += min(room, len(data))
            piece, data = data[:room], data[room:]
            super().data_received(piece)

    def _count_partial(self) -> None:
        """Count an unfinished head; too many bytes of them in all are refused."""
        unfinished = self._fed if self._reading is _HEAD and self._refusal is None else 0
        self._all.partial_bytes += unfinished - self._partial
        self._partial = unfinished
        if unfinished and self._all.partial_bytes > self._limits.partial_bytes:
            self._refuse(503, "Too many heads of requests are unfinished; try again.")

    def _clear_partial(self) -> None:
        self._all.partial_bytes -= self._partial
        self._partial = 0

    def _stop_parsing(self, status: int, detail: str) -> None:
        self._refusal = status, detail
        raise _RefusedError(detail)

    def _refuse(self, status: int, detail: str) -> None:
        """End the connection with a refusal, after the answers to earlier requests."""
        self._all.refusals[_REASONS[status]] += 1
        self._refusal = status, detail
        self._clear_partial()
        if not self._answering:
            self._send_refusal(status, detail)
        elif self._reading is _BODY and not self.pipeline:
            self._refuse_body(status, detail)

    def _refuse_body(self, status: int, detail: str) -> None:
        """Refuse the request that is being answered, in place of its answer."""
        if self.cycle.response_started:
            self.transport.abort()
            return
        # What uvicorn does when a client disconnects: the app stops, its answer is dropped.
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self._send_refusal(status, detail)

    def _send_refusal(self, status: int, detail: str) -> None:
        """Send it, and read on for a while: closing now would reset the client's connection."""
        self.deadline = self.loop.time() + self._limits.linger_s
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self.transport.write(_answer(status, detail, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _overdue_head(self, now: float) -> None:
        if self._answering:  # the beginning of the next request; this one has its own time
            self.deadline = now + self._limits.head_s
            return
        most = self._limits.head_s
        self._refuse(408, f"The head did not arrive within {most:g} s; send it again.")

    def _overdue_body(self, now: float) -> None:
        cycle, limit_s = self.cycle, self._limits.body_stall_s
        if cycle.response_complete:
            self.transport.abort()  # answered long ago, and the rest of the body does not come
        elif self.flow.read_paused or cycle.waiting_for_100_continue:
            self.deadline = now + limit_s  # the server has not asked for more yet
        else:
            self._refuse(408, f"No byte of the body arrived for {limit_s:g} s; send it again.")


def _answer(status: int, detail: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole answer, in the form of the API's errors."""
    body = msgspec.json.encode({"detail": detail, "error": detail})
    retry = f"retry-after: {_RETRY_AFTER_S}\r\n" if status in (429, 503) else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n"
    )
    more = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"%s%s\r\n%s" % (head.encode(), more, body)
