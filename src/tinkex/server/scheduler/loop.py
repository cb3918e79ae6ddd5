"""The scheduler's loop: what is started when, and what happens to lanes afterwards.

Everything the engine does to a model happens while its lane is busy: a restore, a batch, a
snapshot, or leaving.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import EngineDiedError, RequestFailedError, StorageError
from tinkex.server.scheduler.control import needs_model
from tinkex.server.scheduler.finishing import retry_wait_s
from tinkex.server.scheduler.plan import plan
from tinkex.server.scheduler.residents import EngineRestartedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.server.scheduler.batches import Batches
    from tinkex.server.scheduler.endings import Endings
    from tinkex.server.scheduler.finishing import Finishing
    from tinkex.server.scheduler.lanes import Lanes
    from tinkex.server.scheduler.plan import Batch, Lane, Waiting
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.recovery import Recovery
    from tinkex.server.scheduler.residents import Residents
    from tinkex.server.scheduler.snapshots import Snapshots
    from tinkex.server.scheduler.suspects import Suspects
    from tinkex.server.store.records import Operation

_SNAPSHOT_PATIENCE_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wanted:
    """A model that a sample waits for; `error` says why it will not come."""

    done: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class Loop:
    """Plans and starts work; `run` is its one long-lived task."""

    def __init__(
        self,
        clock: Clock,
        lanes: Lanes,
        residents: Residents,
        suspects: Suspects,
        recovery: Recovery,
        batches: Batches,
        published: Published,
        snapshots: Snapshots,
        endings: Endings,
        finishing: Finishing,
        *,
        gap_timeout_s: float,
        max_batch_ops: int,
    ) -> None:
        self._clock = clock
        self._lanes = lanes
        self._residents = residents
        self._suspects = suspects
        self._recovery = recovery
        self._batches = batches
        self._published = published
        self._snapshots = snapshots
        self._endings = endings
        self._finishing = finishing
        self._gap_timeout_s = gap_timeout_s
        self._max_batch_ops = max_batch_ops
        # Mutable state: in which batch each owner had its last turn, whether the device runs one,
        # models that samples wait for, models that kill the engine when they are restored,
        # whether anything new is started, and the loop's wake-up.
        self._turns: dict[str, int] = {}
        self._device_busy = False
        self._wanted: dict[str, _Wanted] = {}
        self._given_up: set[str] = set()
        self._stopping = False
        self._bell = anyio.Event()

    def ring(self) -> None:
        """Plan again."""
        self._bell.set()

    async def bring_back(self, model_id: str) -> None:
        """Return when the engine has a model; raises why it cannot have it."""
        if self._residents.has_model(model_id):
            return
        self._lanes.lane(model_id)
        wanted = self._wanted.setdefault(model_id, _Wanted())
        self.ring()
        await wanted.done.wait()
        if wanted.error is not None:
            raise wanted.error

    async def run(self, group: TaskGroup) -> None:
        """Plan and start work until cancelled."""
        self._stopping, self._device_busy = False, False
        while True:
            # Before planning, so that what arrives meanwhile is planned next.
            self._bell = anyio.Event()
            wait_s = None if self._stopping else self._start(group)
            async with time_limit(self._clock, wait_s):
                await self._bell.wait()

    async def stop(self) -> None:
        """Start nothing new, and return when what runs has ended."""
        self._stopping = True
        while any(lane.busy for lane in self._lanes):
            await self._bell.wait()

    async def write_down(self) -> None:
        """Take a snapshot of every model that has changed; for the end, when nothing runs."""
        for model_id in self._residents.models():
            lane = self._lanes.get(model_id)
            if lane is not None and self._snapshots.changed(model_id):
                await self._published.saved(model_id)
                await self._snapshots.try_take(model_id, lane.next_seq - 1)

    def _start(self, group: TaskGroup) -> float | None:
        """Start what can be; returns how long to wait if nothing happens before."""
        now = self._clock.now()
        for model_id in self._endings.ready():
            self._hold(model_id)
            group.start_soon(self._leave, model_id)
        for lane in list(self._lanes):
            if not lane.busy and lane.rest_until <= now and self._is_missing(lane):
                lane.busy = True
                group.start_soon(self._restore, lane)
        decided = plan(
            self._lanes,
            now,
            device_busy=self._device_busy,
            gap_timeout_s=self._gap_timeout_s,
            max_batch_ops=self._max_batch_ops,
            turns=self._turns,
            suspects=self._suspects,
        )
        for batch in decided.batches:
            operations = self._lanes.take(batch)
            if batch.work != "control":
                self._device_busy = True
                self._count_turn(operations)
            group.start_soon(self._run_batch, group, batch, operations)
        wakes = [decided.wake_at] if decided.wake_at is not None else []
        wakes += [
            lane.rest_until
            for lane in self._lanes
            if lane.model_id in self._wanted and lane.rest_until > now
        ]
        return min(wakes) - now if wakes else None

    def _count_turn(self, operations: Sequence[Operation]) -> None:
        turn = max(self._turns.values(), default=0) + 1
        self._turns.update((op.owner, turn) for op in operations)

    def _hold(self, model_id: str) -> None:
        lane = self._lanes.get(model_id)
        if lane is not None:
            lane.busy = True

    def _is_missing(self, lane: Lane) -> bool:
        """Whether the lane's next work needs a model that the engine does not have."""
        head = lane.head
        operation = None if head is None else self._lanes.waiting(head.op_id)
        needed = operation is not None and needs_model(operation)
        wanted = needed or lane.model_id in self._wanted
        return wanted and not self._residents.has_model(lane.model_id)

    async def _restore(self, lane: Lane) -> None:
        name = f"restoring {lane.model_id}"
        error: Exception | None = None
        try:
            if lane.model_id in self._given_up:
                raise _cannot_be_restored(lane.model_id)
            await self._recovery.restore(lane.model_id)
            self._suspects.clear(name)
            lane.failures = 0
            self._answer(lane.model_id, None)
        except EngineRestartedError as restarted:
            self._rest(lane, restarted, wait=self._residents.hopeless)
        except EngineDiedError:
            if self._suspects.blame(name):
                self._given_up.add(lane.model_id)
                error = _cannot_be_restored(lane.model_id)
        except StorageError as failed:
            self._rest(lane, failed, wait=True)
        except Exception as failed:  # noqa: BLE001 - what waits for the model is told
            error = failed
        if error is not None:
            await self._give_up(lane, error)
        self._free(lane)

    async def _give_up(self, lane: Lane, error: Exception) -> None:
        """The model does not come back: what needs it first fails, the rest tries again."""
        self._answer(lane.model_id, error)
        head = lane.head
        operation = None if head is None else self._lanes.withdraw_head(head.op_id)
        if operation is not None:
            await self._finishing.finish(operation, self._finishing.settled(operation, error))
            self._lanes.passed(lane.model_id, operation.seq_id)

    def _answer(self, model_id: str, error: Exception | None) -> None:
        wanted = self._wanted.pop(model_id, None)
        if wanted is not None:
            wanted.error = error
            wanted.done.set()

    async def _run_batch(
        self, group: TaskGroup, batch: Batch, operations: Sequence[Operation]
    ) -> None:
        lanes = [cast("Lane", self._lanes.get(model_id)) for model_id, _ in batch.runs]
        again: Sequence[Operation] = operations
        try:
            again = await self._batches.run(batch.work, operations)
            for lane in lanes:
                lane.failures = 0
        except StorageError as error:
            for lane in lanes:
                self._rest(lane, error, wait=True)
        except Exception as error:  # noqa: BLE001 - the batch ends here; what it left is pending
            _log.exception("a batch did not end as it should")
            for lane in lanes:
                self._rest(lane, error, wait=True)
        self._lanes.put_back(again)
        if again and self._residents.hopeless:
            for lane in lanes:
                self._rest(lane, EngineDiedError("there is no engine"), wait=True)
        written = [
            self._after(group, lane, run, again)
            for lane, (_, run) in zip(lanes, batch.runs, strict=True)
        ]
        if batch.work != "control":
            if any(written):
                await self._be_patient([done for done in written if done is not None])
            self._device_busy = False
        self.ring()

    async def _be_patient(self, written: Sequence[anyio.Event]) -> None:
        """The next batch is better with these lanes in it, but does not wait for a slow disk."""
        async with time_limit(self._clock, _SNAPSHOT_PATIENCE_S):
            for done in written:
                await done.wait()

    def _after(
        self, group: TaskGroup, lane: Lane, run: Sequence[Waiting], again: Sequence[Operation]
    ) -> anyio.Event | None:
        """Let a lane go on, or first write its model down: then the end of that."""
        left = [op.seq_id for op in again if op.model_id == lane.model_id]
        self._lanes.passed(lane.model_id, min(left) - 1 if left else run[-1].seq_id)
        if self._stopping or not self._snapshots.due(lane.model_id):
            self._free(lane)
            return None
        done = anyio.Event()
        group.start_soon(self._snapshot, lane, done)
        return done

    async def _snapshot(self, lane: Lane, done: anyio.Event) -> None:
        await self._snapshots.try_take(lane.model_id, lane.next_seq - 1)
        done.set()
        self._free(lane)

    async def _leave(self, model_id: str) -> None:
        await self._endings.leave(model_id)
        self._suspects.clear(f"restoring {model_id}")
        self._given_up.discard(model_id)
        self._answer(model_id, RequestFailedError("the session is over", None, "user"))
        self.ring()

    def _rest(self, lane: Lane, error: Exception, *, wait: bool) -> None:
        if wait:
            lane.failures += 1
            lane.rest_until = self._clock.now() + retry_wait_s(lane.failures)
            _log.error("%s is tried again later: %s", lane.model_id, error)

    def _free(self, lane: Lane) -> None:
        lane.busy = False
        self.ring()


def _cannot_be_restored(model_id: str) -> RequestFailedError:
    return RequestFailedError(
        f"the engine died each time model {model_id!r} was brought back, so it is given up; load "
        "its last checkpoint into another model",
        None,
        "server",
    )
