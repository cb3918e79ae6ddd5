"""Which operations run next. Pure: lanes and a time in, batches out.

Each model is a lane. A lane runs in `seq_id` order, whatever the order of arrival: an
operation that came before its predecessor is held until that one arrives, is known never
to come, or has been waited for long enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    waiting: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    # Turns that were given back: withdrawn operations and refused requests.
    void: set[int] = field(default_factory=set[int])

    @property
    def turn(self) -> int:
        """The seq_id whose operation runs next."""
        return next(seq for seq in count(self.next_seq) if seq not in self.void)


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
) -> Plan:
    """Start every control operation that may run, and one device batch if the device is free."""
    idle = [lane for lane in lanes if lane.waiting and not lane.busy]
    held = [lane for lane in idle if _held(lane, now, gap_timeout_s)]
    ready = [(lane, _run(lane)) for lane in idle if lane not in held]
    batches = [
        Batch("control", ((lane.model_id, run),)) for lane, run in ready if run[0].work == "control"
    ]
    device = [(lane.model_id, run) for lane, run in ready if run[0].work != "control"]
    if device and not device_busy:
        batches.append(_device_batch(device, max_batch_ops))
    wake_at = min((lane.last_arrival + gap_timeout_s for lane in held), default=None)
    return Plan(tuple(batches), wake_at)


def _held(lane: Lane, now: float, gap_timeout_s: float) -> bool:
    """Whether the lane still waits for a predecessor of what it has."""
    return min(lane.waiting) > lane.turn and now < lane.last_arrival + gap_timeout_s


def _run(lane: Lane) -> tuple[Waiting, ...]:
    """The next operations of a lane that may go to the engine together."""
    head = lane.waiting[min(lane.waiting)]
    if head.work != "train":
        return (head,)
    # The chunks of one call, and calls that follow it without a step between.
    following = (lane.waiting.get(seq) for seq in count(head.seq_id))
    return tuple(
        op
        for op in takewhile(lambda op: op is not None and op.work == "train", following)
        if op is not None
    )


def _device_batch(ready: Sequence[tuple[str, tuple[Waiting, ...]]], max_batch_ops: int) -> Batch:
    """The oldest operation decides the kind of work; others of that kind join it.

    Lanes are taken owner by owner in turn, so that nobody's many models crowd out the rest.
    """
    oldest_first = sorted(ready, key=lambda item: item[1][0].arrived_at)
    work = oldest_first[0][1][0].work
    rank: dict[str, int] = {}
    keyed: list[tuple[int, int, tuple[str, tuple[Waiting, ...]]]] = []
    for position, item in enumerate(oldest_first):
        head = item[1][0]
        if head.work == work:
            rank[head.owner] = rank.get(head.owner, -1) + 1
            keyed.append((rank[head.owner], position, item))
    runs: list[tuple[str, tuple[Waiting, ...]]] = []
    room = max_batch_ops
    for _, _, (model_id, run) in sorted(keyed, key=lambda k: k[:2]):
        if room <= 0:
            break
        runs.append((model_id, run[:room]))
        room -= len(run[:room])
    return Batch(work, tuple(runs))
