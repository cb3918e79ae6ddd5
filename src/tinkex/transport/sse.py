"""Server-sent events: bytes in any pieces, events out.

Follows the WHATWG rules: lines end with LF, CRLF or CR; `data` lines add up; comments and unknown
fields are skipped; a leading BOM is ignored; an event without its blank line is dropped.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.errors import ClosedError, ResultError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterator

# Events are a few kilobytes; the limit keeps a broken server from filling the memory.
MAX_EVENT_CHARS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `id` is the last one the stream named, also when this event has none."""

    data: str
    event: str = "message"
    id: str = ""
    retry_ms: int | None = None


class SseParser:
    """Give it pieces as they come; it gives back the events they complete."""

    def __init__(self, max_event_chars: int = MAX_EVENT_CHARS) -> None:
        # Mutable state: undecoded bytes (in the decoder), the unfinished line, the event so far,
        # and the last id.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_event_chars = max_event_chars
        self._line: list[str] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._event = ""
        self._id = ""
        self._retry_ms: int | None = None

    def feed(self, chunk: bytes) -> Iterator[SseEvent]:
        """The events completed by `chunk`; raises ResultError when one does not end."""
        text = self._decoder.decode(chunk)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\ufeff")
        if self._after_cr and text:
            # The second half of a CRLF that was cut between two chunks.
            text = text.removeprefix("\n")
            self._after_cr = False
        if not text:
            return
        self._after_cr = text.endswith("\r")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines[:-1]:
            self._grow(len(line))
            self._line.append(line)
            whole = "".join(self._line)
            self._line.clear()
            event = self._take(whole)
            if event is not None:
                yield event
        self._grow(len(lines[-1]))
        self._line.append(lines[-1])

    def _grow(self, chars: int) -> None:
        self._size += chars
        if self._size > self._max_event_chars:
            raise ResultError(f"an event of the stream exceeds {self._max_event_chars} characters")

    def _take(self, line: str) -> SseEvent | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self._size -= len(line)
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit() and len(value) < 10:
                self._retry_ms = int(value)
            case _:
                pass
        return None

    def _dispatch(self) -> SseEvent | None:
        self._size = 0
        event = None
        if self._data:
            event = SseEvent(
                "\n".join(self._data), self._event or "message", self._id, self._retry_ms
            )
        self._data.clear()
        self._event = ""
        return event


class SseStream:
    """The events of one reply, once: a second iteration raises ClosedError."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self._taken = False

    def __aiter__(self) -> AsyncGenerator[SseEvent]:
        if self._taken:
            raise ClosedError("this event stream was already consumed; send the request again")
        self._taken = True
        return self._events()

    async def _events(self) -> AsyncGenerator[SseEvent]:
        parser = SseParser()
        async for chunk in self._chunks:
            for event in parser.feed(chunk):
                yield event
