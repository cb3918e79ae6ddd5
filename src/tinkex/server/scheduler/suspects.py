"""Who may have killed the engine, and keeping them apart until that is clear.

Everything that was running at a death is counted. What was there every time but one runs alone
from then on: with nothing else in the engine, one more death has one cause.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


class Suspects:
    """Counts deaths by operation, and lets suspects run one at a time."""

    def __init__(self, most_deaths: int) -> None:
        self._most = most_deaths
        # Mutable state: deaths by operation, how much runs, whether one runs alone, how many
        # wait, how many of them to run alone, and a bell for every change of these.
        self._deaths: dict[str, int] = {}
        self._running = 0
        self._alone = False
        self._waiting = 0
        self._lonely = 0
        self._changed = anyio.Event()

    def __contains__(self, op_id: object) -> bool:
        """Whether an operation is to run alone."""
        return bool(self._deaths) and self._deaths.get(str(op_id), 0) >= max(self._most - 1, 1)

    def __len__(self) -> int:
        """How many operations were there when the engine died."""
        return len(self._deaths)

    def blame(self, op_id: str) -> bool:
        """Count a death; True when an operation has seen too many."""
        self._deaths[op_id] = self._deaths.get(op_id, 0) + 1
        return self._deaths[op_id] >= self._most

    def clear(self, op_id: str) -> None:
        """An operation has ended."""
        self._deaths.pop(op_id, None)

    @asynccontextmanager
    async def running(self, op_ids: Sequence[str]) -> AsyncGenerator[None]:
        """Hold a place in the engine; alone for a suspect, else beside other innocents."""
        alone = any(op_id in self for op_id in op_ids)
        await self._enter(alone=alone)
        try:
            yield
        finally:
            self._running -= 1
            self._alone = self._alone and not alone
            self._ring()

    async def _enter(self, *, alone: bool) -> None:
        self._lonely += alone
        self._waiting += 1
        try:
            while self._alone or (self._running if alone else self._lonely):
                await self._changed.wait()
            self._running += 1
            self._alone = alone
        finally:
            self._waiting -= 1
            self._lonely -= alone
            self._ring()

    def _ring(self) -> None:
        if self._waiting:
            changed, self._changed = self._changed, anyio.Event()
            changed.set()
