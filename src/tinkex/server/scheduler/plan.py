"""Which operations run next. Pure: queues and a time in, batches out.

Each model has a queue. It runs in `seq_id` order, whatever the order of arrival: an operation
that arrived before its predecessor is held until that one arrives, is known never to come, or
has been waited for long enough.

An operation that was running at several deaths of the engine is a suspect and shares no batch, so
that the next death has one cause.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count, takewhile
from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from tinkex.server.store.records import Operation

Work = Literal["train", "optim", "control"]

_WORK: dict[str, Work] = {"forward": "train", "forward_backward": "train", "optim_step": "optim"}


def work_of(op: Operation) -> Work:
    """Training and optimizer steps share the device; everything else is control."""
    return _WORK.get(op.kind, "control")


@dataclass(slots=True, eq=False)
class Queue:
    """One model's accepted operations that have not started. `plan` only reads it."""

    model_id: str
    next_seq: int = 0
    last_seq: int = -1
    # Something runs for the model, so nothing else of it may start.
    busy: bool = False
    last_arrival: float = 0.0
    # After trouble with the engine or the storage, nothing is tried before this time.
    not_before: float = 0.0
    waiting: dict[int, Operation] = field(default_factory=dict[int, "Operation"])
    # Numbers that no operation will have: withdrawn operations and refused requests.
    void: set[int] = field(default_factory=set[int])

    @property
    def turn(self) -> int:
        """The seq_id whose operation runs next."""
        return next(seq for seq in count(self.next_seq) if seq not in self.void)

    @property
    def head(self) -> Operation | None:
        """What runs next of what has arrived."""
        return self.waiting[min(self.waiting)] if self.waiting else None

    def put(self, op: Operation, now: float) -> None:
        """Add an operation that has just arrived."""
        self.waiting[op.seq_id] = op
        self.last_seq = max(self.last_seq, op.seq_id)
        self.last_arrival = now

    def withdraw(self, op: Operation) -> Operation | None:
        """Remove an operation and skip its number; None when it has started."""
        found = self.waiting.pop(op.seq_id, None)
        if found is not None:
            self.void.add(op.seq_id)
        return found

    def put_back(self, op: Operation) -> None:
        """Let an operation wait again that was withdrawn."""
        if op.seq_id >= self.next_seq:
            self.void.discard(op.seq_id)
            self.waiting[op.seq_id] = op

    def skip(self, seq_id: int) -> None:
        """No operation will have this number."""
        if seq_id >= self.next_seq:
            self.void.add(seq_id)

    def advance(self, seq_id: int) -> None:
        """Every number up to `seq_id` has had its turn."""
        self.next_seq = max(self.next_seq, seq_id + 1)
        self.void = {seq for seq in self.void if seq >= self.next_seq}


@dataclass(frozen=True, slots=True)
class OperationBatch:
    """Operations that run together: one control operation, or many of the same work."""

    work: Work
    runs: tuple[tuple[str, tuple[Operation, ...]], ...]

    @property
    def operations(self) -> list[Operation]:
        """The operations in the order in which the engine gets them."""
        return [op for _, run in self.runs for op in run]


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What to start now, and when to plan again if nothing happens before."""

    batches: tuple[OperationBatch, ...]
    wake_at: float | None
    # Whether a queue waits for a request that is on its way: plan again when it has arrived.
    held: bool = False


def plan(
    queues: Iterable[Queue],
    now: float,
    *,
    device_busy: bool,
    gap_timeout_s: float,
    max_batch_ops: int,
    turns: Mapping[str, int] | None = None,
    suspects: Container[str] = (),
    arriving: Mapping[str, float] | None = None,
) -> SchedulePlan:
    """Start every control operation that may run, and one device batch if the device is free.

    `turns` says in which batch each owner had a place last, `arriving` since when an owner's
    oldest training request has been on its way.
    """
    idle = [queue for queue in queues if queue.waiting and not queue.busy]
    wakes = [_wakes_at(queue, gap_timeout_s, arriving or {}) for queue in idle]
    wake_at = min((at for at in wakes if now < at < inf), default=None)
    free = [queue for queue, at in zip(idle, wakes, strict=True) if at <= now]
    ready = [(queue, _run(queue, suspects)) for queue in free]
    batches = [
        OperationBatch("control", ((queue.model_id, run),))
        for queue, run in ready
        if work_of(run[0]) == "control"
    ]
    device = [(queue.model_id, run) for queue, run in ready if work_of(run[0]) != "control"]
    if device and not device_busy:
        suspect = [item for item in device if item[1][0].op_id in suspects]
        batches.append(_device_batch(suspect[:1] or device, max_batch_ops, turns or {}))
    return SchedulePlan(tuple(batches), wake_at, held=inf in wakes)


def _wakes_at(queue: Queue, gap_timeout_s: float, arriving: Mapping[str, float]) -> float:
    """When the queue may run on: it rests, or still waits for a predecessor of what it has."""
    first = min(queue.waiting)
    if first <= queue.turn:
        return queue.not_before
    gap_ends = queue.last_arrival + gap_timeout_s
    # The missing request may be one that is still being read.
    if arriving.get(queue.waiting[first].owner, inf) < gap_ends:
        return inf
    return max(queue.not_before, gap_ends)


def _run(queue: Queue, suspects: Container[str]) -> tuple[Operation, ...]:
    """The next operations of a queue that may go to the engine together."""
    head = queue.waiting[min(queue.waiting)]
    if work_of(head) != "train" or head.op_id in suspects:
        return (head,)
    # The chunks of one call, and calls that follow it without a step between.
    following = (queue.waiting.get(seq) for seq in count(head.seq_id))
    return tuple(
        op
        for op in takewhile(
            lambda op: op is not None and work_of(op) == "train" and op.op_id not in suspects,
            following,
        )
        if op is not None
    )


def _device_batch(
    ready: Sequence[tuple[str, tuple[Operation, ...]]], max_batch_ops: int, turns: Mapping[str, int]
) -> OperationBatch:
    """One kind of work: the one that is next for the owner whose last turn is longest ago.

    The operations of that kind of all owners join. Places are assigned one by one, in turn by owner
    and then by model, so that many models or a long queue of one tenant do not displace the rest.
    """
    owners: dict[str, list[tuple[str, tuple[Operation, ...]]]] = {}
    for item in sorted(ready, key=lambda item: item[1][0].created_at):
        owners.setdefault(item[1][0].owner, []).append(item)
    # Sorting is stable: of those whose last turn was the same, the oldest operation goes first.
    order = sorted(owners, key=lambda owner: turns.get(owner, -1))
    work = work_of(owners[order[0]][0][1][0])
    models = {
        owner: [item for item in owners[owner] if work_of(item[1][0]) == work] for owner in order
    }
    dealt = _deal([models[owner] for owner in order], max_batch_ops)
    runs = [
        (model_id, run[: dealt[model_id]])
        for position in range(max(map(len, models.values())))
        for owner in order
        for model_id, run in models[owner][position : position + 1]
    ]
    return OperationBatch(work, tuple((model_id, run) for model_id, run in runs if run))


def _deal(owners: Sequence[Sequence[tuple[str, tuple[Operation, ...]]]], room: int) -> Counter[str]:
    """How many operations of each model are in the batch."""
    dealt: Counter[str] = Counter()
    # Per owner: its models in turn, each as often as it has operations.
    hands = [
        deque(
            model_id
            for number in range(min(room, max((len(run) for _, run in models), default=0)))
            for model_id, run in models
            if number < len(run)
        )
        for models in owners
    ]
    while room > 0 and any(hands):
        for hand in hands:
            if hand and room > 0:
                dealt[hand.popleft()] += 1
                room -= 1
    return dealt
