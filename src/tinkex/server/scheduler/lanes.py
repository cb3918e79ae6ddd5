"""The queues of all models: what waits in which turn, and the operations themselves.

A lane that is `busy` belongs to whoever made it so: a batch, a restore or a snapshot. Nobody
else calls the engine for its model meanwhile.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from tinkex.server.scheduler.plan import Lane, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinkex.server.scheduler.plan import Batch
    from tinkex.server.store.records import Operation


class Lanes:
    """One lane per model that has had work. Used from one event loop, without locks."""

    def __init__(self) -> None:
        # Mutable state: the lanes, and the operations that wait in them.
        self._lanes: dict[str, Lane] = {}
        self._operations: dict[str, Operation] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def get(self, model_id: str) -> Lane | None:
        """A model's lane, if it has one."""
        return self._lanes.get(model_id)

    def lane(self, model_id: str) -> Lane:
        """A model's lane; made when it has none."""
        return self._lanes.setdefault(model_id, Lane(model_id))

    def add(self, op: Operation, now: float) -> None:
        """Let an operation wait for its turn."""
        self.put_back([op])
        lane = self.lane(cast("str", op.model_id))
        lane.last_seq = max(lane.last_seq, op.seq_id)
        lane.last_arrival = now

    def take(self, batch: Batch) -> list[Operation]:
        """The operations of a batch, which wait no more; their lanes are busy from now on."""
        for model_id, run in batch.runs:
            lane = self._lanes[model_id]
            lane.busy = True
            for waiting in run:
                del lane.waiting[waiting.seq_id]
        return [self._operations.pop(op_id) for op_id in batch.op_ids]

    def put_back(self, operations: Sequence[Operation]) -> None:
        """Let operations wait again that were taken and did not end."""
        for op in operations:
            lane = self.lane(cast("str", op.model_id))
            lane.waiting[op.seq_id] = Waiting(op.op_id, op.seq_id, op.kind, op.owner, op.created_at)
            self._operations[op.op_id] = op

    def passed(self, model_id: str, seq_id: int) -> None:
        """Turns up to `seq_id` are over."""
        lane = self._lanes[model_id]
        lane.next_seq = max(lane.next_seq, seq_id + 1)
        lane.void = {seq for seq in lane.void if seq >= lane.next_seq}

    def void(self, model_id: str, seq_id: int) -> None:
        """Nobody waits for this turn."""
        lane = self.lane(model_id)
        if seq_id >= lane.next_seq:
            lane.void.add(seq_id)

    def waiting(self, op_id: str) -> Operation | None:
        """An operation that waits."""
        return self._operations.get(op_id)

    def withdraw(self, op: Operation) -> Operation | None:
        """Take an operation out of its lane, unless it has left it."""
        found = self._operations.pop(op.op_id, None)
        if found is not None:
            lane = self._lanes[cast("str", op.model_id)]
            del lane.waiting[op.seq_id]
            lane.void.add(op.seq_id)
        return found

    def withdraw_head(self, op_id: str) -> Operation | None:
        """Take the next operation of a lane out; its turn is about to be over."""
        op = self._operations.pop(op_id, None)
        if op is not None:
            del self._lanes[cast("str", op.model_id)].waiting[op.seq_id]
        return op

    def clear(self) -> None:
        """Forget everything, to begin again from the store."""
        self._lanes.clear()
        self._operations.clear()

    def remove(self, model_id: str) -> None:
        """Forget a lane in which nothing waits."""
        self._lanes.pop(model_id, None)

    def ahead_of(self, op: Operation) -> int:
        """How many waiting operations came before one."""
        mine = (op.created_at, op.seq_id)
        return sum(
            (other.created_at, other.seq_id) < mine
            for other in self._operations.values()
            if other.op_id != op.op_id
        )

    def lengths(self) -> Counter[str]:
        """How many operations wait, by kind."""
        return Counter(op.kind for op in self._operations.values())
