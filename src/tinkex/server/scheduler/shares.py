"""Which samples go to the engine next: everybody's share, then first come, first served.

The engine serves samples in the order in which it gets them, so a tenant who sends thousands must
not have them all there. It gets as many as keep it busy; the rest waits here, tenant by tenant.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.server.store.records import Operation


class Shares:
    """Samples that wait, and how many sequences of each tenant run."""

    def __init__(self, most_running: int) -> None:
        self._most = most_running
        # Mutable state: waiting samples by owner and id, the owner that was served longest ago
        # first, and the sequences of those that run.
        self._waiting: dict[str, OrderedDict[str, Operation]] = {}
        self._running: dict[str, tuple[str, int]] = {}
        self._sums: dict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        """How many samples wait."""
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Operation]:
        """The samples that wait."""
        return (op for queue in self._waiting.values() for op in queue.values())

    def put(self, op: Operation) -> None:
        """Let a sample wait for its turn."""
        self._waiting.setdefault(op.owner, OrderedDict())[op.op_id] = op

    def withdraw(self, op: Operation) -> None:
        """Forget a sample that waits, if it does."""
        queue = self._waiting.get(op.owner)
        if queue is not None and queue.pop(op.op_id, None) is not None and not queue:
            del self._waiting[op.owner]

    def take(self) -> list[Operation]:
        """Those that start now."""
        taken: list[Operation] = []
        while (owner := self._next_owner()) is not None:
            queue = self._waiting.pop(owner)
            _, op = queue.popitem(last=False)
            if queue:
                self._waiting[owner] = queue
            self._running[op.op_id] = (owner, len(op.sequence_ids))
            self._sums[owner] += len(op.sequence_ids)
            taken.append(op)
        return taken

    def done(self, op_id: str) -> None:
        """Make room: a sample ended."""
        owner, size = self._running.pop(op_id, ("", 0))
        if size:
            self._sums[owner] -= size
            if not self._sums[owner]:
                del self._sums[owner]

    def clear(self) -> list[str]:
        """Forget everything, as a restart does; the ids of those that waited come back."""
        waited = [op.op_id for op in self]
        self._waiting.clear()
        self._running.clear()
        self._sums.clear()
        return waited

    def _next_owner(self) -> str | None:
        if not self._waiting:
            return None
        # The fewest running first; of equals, who was served longest ago.
        owner = min(self._waiting, key=lambda name: self._sums.get(name, 0))
        # A full house still has room for whoever has less than an equal share of it.
        share = self._most / len(self._waiting.keys() | self._sums.keys())
        if sum(self._sums.values()) < self._most or self._sums.get(owner, 0) < share:
            return owner
        return None
