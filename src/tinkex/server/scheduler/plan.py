"""Which operations run next. Pure: lanes and a time in, batches out.

Each model is a lane. A lane runs in `seq_id` order, whatever the order of arrival: an
operation that came before its predecessor is held until that one arrives, is known never
to come, or has been waited for long enough.

An operation that was running at several deaths of the engine is a suspect and shares no batch, so
that the next death has one cause.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from tinkex.server.store.records import OpKind

Work = Literal["train", "optim", "control"]

_WORK: dict[str, Work] = {"forward": "train", "forward_backward": "train", "optim_step": "optim"}


@dataclass(frozen=True, slots=True)
class Waiting:
    """An accepted operation that has not started."""

    op_id: str
    seq_id: int
    kind: OpKind
    owner: str
    arrived_at: float

    @property
    def work(self) -> Work:
        """Training and optimizer steps share the device; everything else is control."""
        return _WORK.get(self.kind, "control")


@dataclass(slots=True, eq=False)
class Lane:
    """One model's queue. The worker changes it, the plan only reads it."""

    model_id: str
    next_seq: int = 0
    last_seq: int = -1
    busy: bool = False
    last_arrival: float = 0.0
    # After trouble with engine or storage, so often in a row, nothing is tried before this time.
    failures: int = 0
    rest_until: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    # Turns that were given back: withdrawn operations and refused requests.
    void: set[int] = field(default_factory=set[int])

    @property
    def turn(self) -> int:
        """The seq_id whose operation runs next."""
        return next(seq for seq in count(self.next_seq) if seq not in self.void)

    @property
    def head(self) -> Waiting | None:
        """What runs next of what has arrived."""
        return self.waiting[min(self.waiting)] if self.waiting else None


@dataclass(frozen=True, slots=True)
class Batch:
    """Operations that run together: one control operation, or many of the same work."""

    work: Work
    runs: tuple[tuple[str, tuple[Waiting, ...]], ...]

    @property
    def op_ids(self) -> list[str]:
        """The operations in the order in which the engine gets them."""
        return [op.op_id for _, run in self.runs for op in run]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start now, and when to plan again if nothing happens before."""

    batches: tuple[Batch, ...]
    wake_at: float | None


def plan(
    lanes: Iterable[Lane],
    now: float,
    *,
    device_busy: bool,
    gap_timeout_s: float,
    max_batch_ops: int,
    turns: Mapping[str, int] | None = None,
    suspects: Container[str] = (),
) -> Plan:
    """Start every control operation that may run, and one device batch if the device is free.

    `turns` says in which batch each owner had a place last.
    """
    idle = [lane for lane in lanes if lane.waiting and not lane.busy]
    held = [lane for lane in idle if _wakes_at(lane, gap_timeout_s) > now]
    wake_at = min((_wakes_at(lane, gap_timeout_s) for lane in held), default=None)
    free = [lane for lane in idle if lane not in held]
    ready = [(lane, _run(lane, suspects)) for lane in free]
    batches = [
        Batch("control", ((lane.model_id, run),)) for lane, run in ready if run[0].work == "control"
    ]
    device = [(lane.model_id, run) for lane, run in ready if run[0].work != "control"]
    if device and not device_busy:
        suspect = [item for item in device if item[1][0].op_id in suspects]
        batches.append(_device_batch(suspect[:1] or device, max_batch_ops, turns or {}))
    return Plan(tuple(batches), wake_at)


def _wakes_at(lane: Lane, gap_timeout_s: float) -> float:
    """When the lane may go on: it rests, or still waits for a predecessor of what it has."""
    missing = min(lane.waiting) > lane.turn
    return max(lane.rest_until, lane.last_arrival + gap_timeout_s if missing else 0.0)


def _run(lane: Lane, suspects: Container[str]) -> tuple[Waiting, ...]:
    """The next operations of a lane that may go to the engine together."""
    head = lane.waiting[min(lane.waiting)]
    if head.work != "train" or head.op_id in suspects:
        return (head,)
    # The chunks of one call, and calls that follow it without a step between.
    following = (lane.waiting.get(seq) for seq in count(head.seq_id))
    return tuple(
        op
        for op in takewhile(
            lambda op: op is not None and op.work == "train" and op.op_id not in suspects,
            following,
        )
        if op is not None
    )


def _device_batch(
    ready: Sequence[tuple[str, tuple[Waiting, ...]]], max_batch_ops: int, turns: Mapping[str, int]
) -> Batch:
    """One kind of work: the one that is next for the owner whose last turn is longest ago.

    Everybody's operations of that kind join. Places are dealt out one by one, owner by owner and
    then lane by lane, so that nobody's many models or long queue crowd out the rest.
    """
    owners: dict[str, list[tuple[str, tuple[Waiting, ...]]]] = {}
    for item in sorted(ready, key=lambda item: item[1][0].arrived_at):
        owners.setdefault(item[1][0].owner, []).append(item)
    # Sorting is stable: of those whose last turn was the same, the oldest operation goes first.
    order = sorted(owners, key=lambda owner: turns.get(owner, -1))
    work = owners[order[0]][0][1][0].work
    lanes = {owner: [item for item in owners[owner] if item[1][0].work == work] for owner in order}
    dealt = _deal([lanes[owner] for owner in order], max_batch_ops)
    runs = [
        (model_id, run[: dealt[model_id]])
        for position in range(max(map(len, lanes.values())))
        for owner in order
        for model_id, run in lanes[owner][position : position + 1]
    ]
    return Batch(work, tuple((model_id, run) for model_id, run in runs if run))


def _deal(owners: Sequence[Sequence[tuple[str, tuple[Waiting, ...]]]], room: int) -> Counter[str]:
    """How many operations of each lane are in the batch."""
    dealt: Counter[str] = Counter()
    # Per owner: its lanes in turn, each as often as it has operations.
    hands = [
        deque(
            model_id
            for number in range(min(room, max((len(run) for _, run in lanes), default=0)))
            for model_id, run in lanes
            if number < len(run)
        )
        for lanes in owners
    ]
    while room > 0 and any(hands):
        for hand in hands:
            if hand and room > 0:
                dealt[hand.popleft()] += 1
                room -= 1
    return dealt
