"""When clients waited for results, for the trace of a session. In memory, the latest ones."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_KEPT = 20_000


class Poll(NamedTuple):
    """One request that waited; `target` is the operation or the sampler it asked about."""

    session_id: str
    target: str
    began_at: float
    ended_at: float
    status: int


class Polls:
    """The latest polls of all sessions."""

    def __init__(self, kept: int = _KEPT) -> None:
        # Mutable state: the polls, in the order in which they ended.
        self._polls: deque[Poll] = deque(maxlen=kept)

    def add(self, poll: Poll) -> None:
        """Keep one more, and forget the oldest when there are too many."""
        self._polls.append(poll)

    def of(self, session_id: str) -> list[Poll]:
        """Those of one session."""
        return [poll for poll in self._polls if poll.session_id == session_id]
