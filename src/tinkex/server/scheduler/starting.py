"""What a server finds in its store when it starts, put back into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tinkex.server.scheduler.finishing import CANCELLED
from tinkex.server.scheduler.recovery import is_closed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clock import Clock
    from tinkex.server.scheduler.lanes import Lanes
    from tinkex.server.scheduler.plan import Lane
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Model, Operation


async def load_lanes(store: Store, lanes: Lanes, clock: Clock) -> list[Operation]:
    """Fill the lanes with what was accepted and not finished; returns all of that."""
    # Nobody was silent while the server was away.
    await store.touch_sessions(clock.wall())
    lanes.clear()
    turns = await store.last_turns()
    for model in await store.models():
        if not is_closed(model):
            await _load_lane(store, lanes.lane(model.model_id), model, turns)
    pending = list(await store.pending())
    for op in pending:
        if op.kind != "sample":
            lanes.add(op, clock.now())
            lane = lanes.lane(cast("str", op.model_id))
            lane.next_seq = min(lane.next_seq, op.seq_id)
    return pending


async def _load_lane(store: Store, lane: Lane, model: Model, turns: Mapping[str, int]) -> None:
    last = turns.get(model.model_id, -1)
    op = await store.get_operation(f"{model.model_id}:{last}")
    if op is not None and _was_cancelled(op):
        # It ended before its turn, so the turns before it may still come.
        journal = await store.journal(model.model_id, model.snapshot_seq)
        ended = [o for o in journal if o.state == "done"]
        last = max((o.seq_id for o in ended if not _was_cancelled(o)), default=-1)
        lane.void = {o.seq_id for o in ended if _was_cancelled(o) and o.seq_id > last}
    lane.next_seq = max(last, model.snapshot_seq) + 1
    lane.last_seq = max(lane.next_seq - 1, *lane.void, -1)


def _was_cancelled(op: Operation) -> bool:
    return op.outcome is not None and op.outcome.error == CANCELLED.error
