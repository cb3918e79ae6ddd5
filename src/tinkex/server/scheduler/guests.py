"""Samples that are no operations: their callers wait for them on an open connection.

They run where they were asked for and are gone with their caller. What they share with all other
samples is kept here: the limits and the turn of their owner.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tinkex.server.scheduler.load import Load
    from tinkex.server.scheduler.shares import Shares
    from tinkex.server.store.records import Operation


class Guests:
    """Places among the running samples; `start` begins whatever has its turn."""

    def __init__(self, load: Load, shares: Shares, start: Callable[[], None]) -> None:
        self._load = load
        self._shares = shares
        self._start = start
        # Mutable state: whose turn has come, by id.
        self._turns: dict[str, anyio.Event] = {}

    def __len__(self) -> int:
        """Those whose turn has come."""
        return sum(turn.is_set() for turn in self._turns.values())

    @asynccontextmanager
    async def place(self, op: Operation) -> AsyncGenerator[None]:
        """Wait for a turn and keep it for the block; `op` is never stored."""
        turn = self._turns[op.op_id] = anyio.Event()
        self._load.add(op)
        self._shares.put(op)
        self._start()
        try:
            await turn.wait()
            yield
        finally:
            del self._turns[op.op_id]
            self._shares.withdraw(op)
            self._shares.done(op.op_id)
            self._load.remove(op.op_id)
            self._start()

    def begin(self, op_id: str) -> bool:
        """Give a guest its turn; False when it is none."""
        turn = self._turns.get(op_id)
        if turn is not None:
            turn.set()
        return turn is not None

    def begin_all(self) -> None:
        """Nobody keeps the turns any more."""
        for turn in self._turns.values():
            turn.set()
