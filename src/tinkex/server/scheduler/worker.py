"""The door of the scheduler: work comes in here, and leaves with an outcome in the store.

The worker puts the scheduler's parts together. It promises that everything accepted ends with
an outcome, if need be after a restart of the engine or of the server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import anyio

from tinkex.clock import time_limit
from tinkex.server.scheduler.batches import Batches
from tinkex.server.scheduler.control import Control
from tinkex.server.scheduler.endings import Endings
from tinkex.server.scheduler.finishing import CANCELLED, Finishing
from tinkex.server.scheduler.jobs import Done, Jobs
from tinkex.server.scheduler.lanes import Lanes
from tinkex.server.scheduler.load import Load
from tinkex.server.scheduler.loop import Loop
from tinkex.server.scheduler.lost import LostSamples
from tinkex.server.scheduler.published import Published
from tinkex.server.scheduler.recovery import Recovery
from tinkex.server.scheduler.residents import Residents
from tinkex.server.scheduler.rows import Rows
from tinkex.server.scheduler.sample_runs import SampleRuns
from tinkex.server.scheduler.saves import Saves
from tinkex.server.scheduler.shares import Shares
from tinkex.server.scheduler.snapshots import Limits, Snapshots
from tinkex.server.scheduler.starting import load_lanes
from tinkex.server.scheduler.suspects import Suspects
from tinkex.server.store.records import Outcome
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tinkex.clock import Clock
    from tinkex.engine.base import Engine
    from tinkex.server.observe.meters import Meters
    from tinkex.server.scheduler.waiters import Waiters
    from tinkex.server.settings import Settings
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation, OpKind


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an unfinished operation stands: how many go first, and since when."""

    state: Literal["queued", "running"]
    position: int
    since: float


class Worker:
    """Runs accepted operations; `run()` is its one long-lived task."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        clock: Clock,
        waiters: Waiters,
        meters: Meters,
        settings: Settings,
        *,
        encode: Callable[[OpKind, object], bytes],
        decode: Callable[[Operation], object],
    ) -> None:
        self._store = store
        self._clock = clock
        self._meters = meters
        self._settings = settings
        self.load = Load()
        self.rows = Rows(store)
        self.lost = LostSamples(store, clock)
        self._lanes = Lanes()
        self._residents = residents = Residents(engine)
        self._suspects = suspects = Suspects(settings.max_engine_deaths)
        self._published = published = Published(store, residents, clock)
        self._finishing = finishing = Finishing(
            store, clock, waiters, meters, self.load, self.lost, encode
        )
        limits = Limits(settings.snapshot_ops, settings.snapshot_bytes, settings.snapshot_s)
        self._snapshots = snapshots = Snapshots(
            store, self.rows, residents, published, clock, limits
        )
        self.saves = Saves(store, self.rows, residents, published, clock, settings.max_stored_bytes)
        jobs = Jobs(store, decode)
        control = Control(
            store, jobs, self.saves, self.rows, residents, published, snapshots, clock
        )
        self._samples = SampleRuns(
            store,
            clock,
            jobs,
            residents,
            suspects,
            finishing,
            self.load,
            Shares(settings.max_sequences_running),
            self._bring_back,
        )
        self._endings = Endings(
            store,
            self.rows,
            self._lanes,
            self._samples,
            residents,
            published,
            snapshots,
            self.saves,
            self.lost,
        )
        self._loop = Loop(
            clock,
            self._lanes,
            residents,
            suspects,
            Recovery(store, jobs, residents, published, snapshots, settings.max_batch_ops),
            Batches(
                store, clock, jobs, control, residents, suspects, published, snapshots, finishing
            ),
            published,
            snapshots,
            self._endings,
            finishing,
            gap_timeout_s=settings.gap_timeout_s,
            max_batch_ops=settings.max_batch_ops,
        )

    @property
    def samples_in_flight(self) -> int:
        """Samples accepted and not finished."""
        return len(self._samples)

    def queue_lengths(self) -> dict[str, int]:
        """How many operations wait for their turn, by kind."""
        return dict(self._lanes.lengths() + Counter({"sample": self._samples.waiting}))

    @property
    def journal_bytes(self) -> int:
        """The bodies that a crash would need: of what has not run, or is in no snapshot yet."""
        return self.load.queued_bytes + self._snapshots.size_bytes

    def held(self) -> dict[str, int]:
        """How much of everything is in memory; a server at rest without sessions has nothing."""
        return {
            "lanes": len(self._lanes),
            "samples": len(self._samples),
            "leaving models": len(self._endings),
            "unsaved samplers": len(self._published),
            "changed models": len(self._snapshots),
            "resident models": len(self._residents.models()),
            "suspects": len(self._suspects),
            "samplers": len(self.lost),
        }

    async def run(self) -> None:
        """Take up what the store has, then plan and start work until cancelled."""
        pending = await load_lanes(self._store, self._lanes, self._clock)
        for op in pending:
            self.load.add(op)
        await self._endings.resume()
        async with anyio.create_task_group() as group:
            group.start_soon(self._published.run)
            self._samples.run_in(group)
            for op in pending:
                if op.kind == "sample":
                    self._samples.put(op)
            try:
                await self._loop.run(group)
            finally:
                self._samples.run_in(None)

    async def stop(self) -> None:
        """Start nothing new, let what runs end, and write models down, in the time there is."""
        grace_s = self._settings.grace_s
        if grace_s <= 0:
            return
        async with time_limit(self._clock, grace_s):
            self._samples.run_in(None)
            await self._loop.stop()
            await self._samples.idle()
            await self._loop.write_down()

    async def submit(self, operation: Operation) -> Operation:
        """Accept an operation, or find the one that was accepted under its id."""
        if operation.kind == "sample":
            return await self._submit_sample(operation)
        accepted, new = operation, False
        # Between the store and the lane nobody may interrupt: it would never run.
        with anyio.CancelScope(shield=True):
            accepted, new = await self._store.submit(operation)
            if new:
                self._accepted(accepted)
                await self._enqueue(accepted)
        return accepted

    async def _submit_sample(self, operation: Operation) -> Operation:
        numbered = operation.op_id == f"{operation.sampler_id}:{operation.seq_id}"
        if numbered:
            await self.lost.begin(operation)
        accepted, new = await self._store.submit(operation)
        if new:
            self._accepted(accepted)
            if numbered:
                self.lost.began(accepted)
            self._samples.put(accepted)
        return accepted

    def place(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """A turn for a sample that its caller runs by itself; the operation is never stored."""
        return self._samples.guests.place(operation)

    async def submit_done(self, operation: Operation, value: object) -> Operation:
        """Accept an operation that needed no waiting; its result is there at once."""
        accepted, new = await self._store.submit(operation)
        if new or accepted.state != "done":
            outcome = self._finishing.settled(accepted, Done(value, Usage()))
            await self._finishing.finish(accepted, outcome)
        return accepted

    def take_turn(self, model_id: str) -> int:
        """The turn of a request whose client does not number its requests."""
        lane = self._lanes.lane(model_id)
        lane.last_seq += 1
        return lane.last_seq

    def give_turn_back(self, model_id: str, seq_id: int) -> None:
        """Nobody waits for a turn that was taken for nothing."""
        self._lanes.void(model_id, seq_id)
        self._loop.ring()

    def is_waited_for(self, model_id: str, seq_id: int) -> bool:
        """Whether operations of a model that are here cannot run before this one."""
        lane = self._lanes.get(model_id)
        return lane is not None and bool(lane.waiting) and seq_id < min(lane.waiting)

    async def cancel(self, operation: Operation) -> bool:
        """Withdraw an operation; False when it ran already or cannot be stopped."""
        if operation.kind == "sample":
            return await self._samples.cancel(operation)
        waiting = self._lanes.withdraw(operation)
        if waiting is None:
            return False
        self._loop.ring()
        return await self._finishing.finish(waiting, CANCELLED)

    async def end_session(self, session_id: str) -> None:
        """Free what a session held: samples at once, models when their operations have run."""
        try:
            await self._endings.end_session(session_id)
        finally:
            self._loop.ring()

    async def retry_endings(self) -> None:
        """Go on with clean-ups that a broken storage has stopped."""
        await self._endings.retry()
        self._loop.ring()

    async def progress(self, operation: Operation) -> Progress:
        """How far an unfinished operation is."""
        if operation.kind == "sample":
            running = self._samples.is_running(operation.op_id)
        else:
            running = self._lanes.waiting(operation.op_id) is None
        if running and operation.started_at is not None:
            return Progress("running", 0, operation.started_at)
        ahead = 0 if operation.kind == "sample" else self._lanes.ahead_of(operation)
        return Progress("queued", ahead, operation.created_at)

    def forget_samples(self) -> None:
        """Drop every sample in flight without an outcome, as a restart does."""
        self._samples.forget()

    def _accepted(self, operation: Operation) -> None:
        self._meters.accepted(operation)
        self.load.add(operation)

    async def _bring_back(self, model_id: str) -> None:
        await self._loop.bring_back(model_id)

    async def _enqueue(self, op: Operation) -> None:
        lane = self._lanes.lane(cast("str", op.model_id))
        if op.seq_id < lane.next_seq:
            late = (
                f"request {op.seq_id} of {op.model_id} came after its turn: request "
                f"{lane.next_seq - 1} has already run"
            )
            await self._finishing.finish(op, Outcome(error=late, category="server"))
            return
        self._lanes.add(op, self._clock.now())
        self._loop.ring()
