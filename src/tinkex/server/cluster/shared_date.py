"""One date for all nodes: that of the database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinkex.clock import Clock

# The clocks of machines that are looked after differ by less.
_WORTH_A_LINE_S: Final = 5.0

_log = logging.getLogger(__name__)


class SharedDate:
    """Another clock with the date of the database, as far as it was heard.

    Nodes compare dates that other nodes have stored: heartbeats, expiry, signatures.
    """

    def __init__(self, clock: Clock, now: float) -> None:
        self._clock = clock
        # Mutable state: by how much the database is ahead of this machine.
        self._ahead_s = now - clock.wall()
        if abs(self._ahead_s) > _WORTH_A_LINE_S:
            _log.warning(
                "the clock of this machine differs from the database's by %.0f s; the node uses "
                "the database's, and log lines have this machine's",
                self._ahead_s,
            )

    def follow(self, now: float, asked_at: float) -> None:
        """Note the date that the database told when it was asked at a time of `now()`."""
        # Half of what the answer took has passed since.
        since_s = (self._clock.now() - asked_at) / 2
        self._ahead_s = now + since_s - self._clock.wall()

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall() + self._ahead_s

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
