"""How much every tenant has in flight: accepted and not finished."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.server.store.records import Operation


@dataclass(frozen=True, slots=True)
class Amount:
    """What one tenant has in flight; `queued_bytes` are the bodies of its operations."""

    operations: int = 0
    samples: int = 0
    queued_bytes: int = 0


class Load:
    """Counts of operations in flight, by owner. Used from one event loop, without locks."""

    def __init__(self) -> None:
        # Mutable state: what is in flight, and what that adds up to per owner. Counting by id
        # makes an operation that ends twice count once.
        self._in_flight: dict[str, tuple[str, Amount]] = {}
        self._sums: dict[str, Amount] = defaultdict(Amount)

    def add(self, op: Operation) -> None:
        """Count an accepted operation."""
        if op.op_id not in self._in_flight:
            sample = op.kind == "sample"
            amount = Amount(int(not sample), int(sample), len(op.body))
            self._in_flight[op.op_id] = (op.owner, amount)
            self._change(op.owner, amount, 1)

    def remove(self, op_id: str) -> None:
        """Count an operation no more: it ended, or was forgotten."""
        owner, amount = self._in_flight.pop(op_id, ("", None))
        if amount is not None:
            self._change(owner, amount, -1)

    def of(self, owner: str) -> Amount:
        """What a tenant has in flight."""
        return self._sums.get(owner, Amount())

    @property
    def queued_bytes(self) -> int:
        """The bodies of everything in flight."""
        return sum(each.queued_bytes for each in self._sums.values())

    def of_others(self, owner: str) -> int:
        """How many training operations all the other tenants have in flight."""
        return sum(each.operations for name, each in self._sums.items() if name != owner)

    def _change(self, owner: str, by: Amount, sign: int) -> None:
        now = self._sums[owner]
        changed = Amount(
            now.operations + sign * by.operations,
            now.samples + sign * by.samples,
            now.queued_bytes + sign * by.queued_bytes,
        )
        if changed == Amount():
            del self._sums[owner]
        else:
            self._sums[owner] = changed
