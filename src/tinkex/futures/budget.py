"""A byte budget that one oversized item can always pass.

Waiters are admitted in order as soon as nothing is overdrawn; an admitted item may overdraw the
budget, so a payload larger than the whole budget is delayed, never stuck.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinkex.metrics import meter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class ByteBudget:
    """Bytes that may be under way at once; used from one loop only."""

    def __init__(self, size_bytes: int) -> None:
        # Mutable state: what is left (negative while overdrawn) and who waits, oldest first.
        self.left = size_bytes
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def reserve(self, size_bytes: int) -> AsyncGenerator[None]:
        """Hold `size_bytes` of the budget for the body."""
        await self.take(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)

    async def take(self, size_bytes: int) -> None:
        """Wait for room, then hold `size_bytes`; every take needs one `give_back`."""
        if self._waiters or self.left < 0:
            loop = asyncio.get_running_loop()
            waiter, asked = loop.create_future(), loop.time()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._admit()  # admitted and cancelled at once: pass the place on
                raise
            if meter.on:
                meter.wait("bytes", loop.time() - asked)
        self.left -= size_bytes
        self._admit()

    def give_back(self, size_bytes: int) -> None:
        """Return what `take` held."""
        self.left += size_bytes
        self._admit()

    def _admit(self) -> None:
        # One at a time: the admitted waiter subtracts first and then calls this again.
        while self._waiters and self.left >= 0:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
