"""One answer while it grows: tokens in, text and log-probabilities out.

The engine's tokens include those that stop a sequence; an answer's text ends before them. TextCodec
that could be the beginning of a stop string is held back until it is clear what it is. A whole
answer is a stream that is read at once, so both give the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tinkex.server.openai.tokenization import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.protocol import Best
    from tinkex.server.openai.tokenization import TextCodec

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer; `offset` is the number of characters before it."""

    id: int
    logprob: float | None
    best: Best | None
    offset: int


@dataclass(slots=True)
class Delta:
    """What an answer has grown by."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list[Token])
    finish: FinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)

    def extend(self, other: Delta) -> None:
        """Grow by what came after."""
        self.text += other.text
        self.tokens += other.tokens
        self.finish = self.finish or other.finish


class Choice:
    """An answer; `feed` it tokens, then `end` it. After its end more tokens change nothing.

    `start` is the number of characters before its own.
    """

    def __init__(self, text: TextCodec, stops: Sequence[str] = (), *, start: int = 0) -> None:
        self._stops = stops
        self._eos = text.eos_token_ids
        self._detokenizer = Detokenizer(text.pieces)
        # Mutable state: characters decoded and given out, those held back between the two, the
        # tokens whose text is not out yet, and why it ended.
        self._decoded = self._given = start
        self._held = ""
        self._waiting: deque[Token] = deque()
        self._finish: FinishReason | None = None

    def feed(self, token: int, logprob: float | None, best: Best | None = None) -> Delta:
        """The growth by one token."""
        if self._finish is not None:
            return Delta()
        if token in self._eos:
            return self.end("stop")
        self._waiting.append(Token(token, logprob, best, self._decoded))
        return self._grow(self._detokenizer.feed(token))

    def end(self, reason: FinishReason) -> Delta:
        """The growth by the end itself."""
        if self._finish is not None:
            return Delta()
        last = self._grow(self._detokenizer.end())
        if self._finish is None:
            last.extend(self._give(self._held))
            # What stopped it is no part of it; without a stop every token is.
            last.tokens += self._waiting if reason == "length" else ()
            self._finish = last.finish = reason
        return last

    def _grow(self, text: str) -> Delta:
        self._decoded += len(text)
        self._held += text
        stop = first_stop(self._held, self._stops)
        if stop is not None:
            delta = self._give(self._held[:stop])
            self._finish = delta.finish = "stop"
            return delta
        return self._give(self._held[: len(self._held) - _held_back(self._held, self._stops)])

    def _give(self, text: str) -> Delta:
        self._given += len(text)
        self._held = self._held[len(text) :]
        tokens: list[Token] = []
        while self._waiting and self._waiting[0].offset < self._given:
            tokens.append(self._waiting.popleft())
        return Delta(text, tokens)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _held_back(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return length
    return 0
