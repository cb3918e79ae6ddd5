"""Samples: which wait, which run, and how each ends.

The engine runs samples in the order in which it gets them, so thousands of one tenant must not all
be there. It gets as many as keep it busy; the rest waits here, in turn by owner.

Some samples are no operations: their callers wait for them on an open connection, run them
themselves, and cancel them by disconnecting. They share the limits and the turns.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import anyio

from tinkex.engine.protocol import Weights
from tinkex.errors import EngineDiedError
from tinkex.server.scheduler.checkpoints import failure
from tinkex.server.scheduler.engine_access import EngineRestartedError
from tinkex.server.scheduler.jobs import died_under, sampled
from tinkex.server.scheduler.outcomes import CANCELLED
from tinkex.server.store.records import changed
from tinkex.server.supervision import no_stray_cancellation, retry_wait_s

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.engine.protocol import SampleOp, SampleResult
    from tinkex.server.scheduler.engine_access import EngineAccess
    from tinkex.server.scheduler.jobs import Done, Jobs
    from tinkex.server.scheduler.outcomes import Load, Outcomes
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Operation, OperationOutcome

    # Computes a sample on another node, or returns None.
    Elsewhere = Callable[[SampleOp, Weights], Awaitable["SampleResult | None"]]

_log = logging.getLogger(__name__)


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

    def withdraw(self, op: Operation) -> bool:
        """Forget a sample that waits; False if it does not."""
        queue = self._waiting.get(op.owner)
        if queue is None or queue.pop(op.op_id, None) is None:
            return False
        if not queue:
            del self._waiting[op.owner]
        return True

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
        """Free the place of a sample that ended."""
        owner, size = self._running.pop(op_id, ("", 0))
        if size:
            self._sums[owner] -= size
            if not self._sums[owner]:
                del self._sums[owner]

    def clear(self) -> list[str]:
        """Forget everything, as a restart does; returns the ids of those that waited."""
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
        # Above the limit, an owner below an equal share of it may still start one.
        share = self._most / len(self._waiting.keys() | self._sums.keys())
        if sum(self._sums.values()) < self._most or self._sums.get(owner, 0) < share:
            return owner
        return None


class SampleRunner:
    """The samples in flight; `restored` returns when the engine has a model.

    `elsewhere` may have another node compute a sample whose weights that node can load.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        jobs: Jobs,
        access: EngineAccess,
        samplers: PublishedSamplers,
        outcomes: Outcomes,
        load: Load,
        shares: Shares,
        restored: Callable[[str], Awaitable[None]],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._elsewhere = elsewhere
        self._jobs = jobs
        self._access = access
        self._samplers = samplers
        self._outcomes = outcomes
        self._load = load
        self._shares = shares
        self._restored = restored
        # Mutable state: the task group of samples while there is one, the samples that run, an
        # event for the next end if one is waited for, and the turns of callers that run their own
        # samples.
        self._group: TaskGroup | None = None
        self._ended: anyio.Event | None = None
        self._running: dict[str, tuple[Operation, anyio.CancelScope]] = {}
        self._turns: dict[str, anyio.Event] = {}

    def __len__(self) -> int:
        """Samples accepted and not finished."""
        callers = sum(turn.is_set() for turn in self._turns.values())
        return len(self._shares) + len(self._running) + callers

    @property
    def waiting(self) -> int:
        """Samples that have not started."""
        return len(self._shares)

    @property
    def running(self) -> int:
        """Samples that have started."""
        return len(self._running)

    def is_running(self, op_id: str) -> bool:
        """Whether a sample has started."""
        return op_id in self._running

    async def idle(self) -> None:
        """Return when none runs."""
        while self._running:
            await self._next_end()

    async def idle_of(self, sampler_ids: Collection[str]) -> None:
        """Return when none of these samplers waits or runs."""
        while self._of_samplers(sampler_ids):
            await self._next_end()

    async def _next_end(self) -> None:
        self._ended = self._ended or anyio.Event()
        await self._ended.wait()

    def _of_samplers(self, sampler_ids: Collection[str]) -> list[Operation]:
        running = [op for op, _ in self._running.values()]
        return [op for op in (*running, *self._shares) if op.sampler_id in sampler_ids]

    def forget_of(self, sampler_ids: Collection[str]) -> list[str]:
        """Drop the samples of these samplers without an outcome: their clients send them again.

        Returns their ids.
        """
        forgotten = self._of_samplers(sampler_ids)
        for op in forgotten:
            self._shares.withdraw(op)
            self._load.remove(op.op_id)
            _, scope = self._running.get(op.op_id, (op, None))
            if scope is not None:
                scope.cancel()
        return [op.op_id for op in forgotten]

    def run_in(self, group: TaskGroup | None) -> None:
        """Start samples in a group from now on, or none at all."""
        self._group = group
        self.start()

    def put(self, op: Operation) -> None:
        """Run a sample as soon as it is its owner's turn."""
        self._shares.put(op)
        self.start()

    def start(self) -> None:
        """Start those whose turn it is."""
        if self._group is not None:
            for op in self._shares.take():
                turn = self._turns.get(op.op_id)
                if turn is not None:
                    turn.set()
                    continue
                scope = anyio.CancelScope()
                self._running[op.op_id] = (op, scope)
                self._group.start_soon(self._run, op, scope)

    @asynccontextmanager
    async def place(self, op: Operation) -> AsyncGenerator[None]:
        """Wait for a turn and keep it for the block, which samples; `op` is never stored."""
        turn = self._turns[op.op_id] = anyio.Event()
        self._load.add(op)
        self._shares.put(op)
        self.start()
        try:
            await turn.wait()
            async with self._access.running((op.op_id,)):
                yield
        finally:
            del self._turns[op.op_id]
            self._shares.withdraw(op)
            self._shares.done(op.op_id)
            self._load.remove(op.op_id)
            self.start()

    async def cancel(self, op: Operation) -> bool:
        """Withdraw a sample; False when it has ended."""
        waited = self._shares.withdraw(op)
        try:
            cancelled = await self._outcomes.finish(op, CANCELLED)
        except BaseException:
            if waited:
                self.put(op)
            raise
        _, scope = self._running.get(op.op_id, (None, None))
        if scope is not None:
            scope.cancel()
        return cancelled

    def of_session(self, session_id: str) -> list[Operation]:
        """The samples of a session that have not ended."""
        running = [op for op, _ in self._running.values()]
        return [op for op in (*running, *self._shares) if op.session_id == session_id]

    def forget(self) -> None:
        """Drop every sample without an outcome, as a restart does."""
        for op_id in (*self._shares.clear(), *self._running):
            self._load.remove(op_id)
        for turn in self._turns.values():
            turn.set()
        scopes = [scope for _, scope in self._running.values()]
        self._running.clear()
        for scope in scopes:
            scope.cancel()

    async def _run(self, op: Operation, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                now = self._clock.wall()
                op = changed(op, state="running", started_at=now)
                await self._outcomes.start([op.op_id], now)
                outcome = self._outcomes.settled(op, await self._result(op))
                await self._finish(op, outcome)
            finally:
                self._access.clear([op.op_id])
                # By scope: after `forget`, the same id may already belong to a repeated sample.
                if self._running.get(op.op_id, (op, None))[1] is scope:
                    del self._running[op.op_id]
                    self._shares.done(op.op_id)
                    self.start()
                    if self._ended is not None:
                        self._ended.set()
                        self._ended = None

    async def _finish(self, op: Operation, outcome: OperationOutcome) -> None:
        """Record an outcome; one that cannot be stored is replaced by the failure."""
        failures = 0
        while True:
            try:
                await self._outcomes.finish(op, outcome)
                return
            except Exception as error:  # noqa: BLE001 - tried again
                _log.exception("the outcome of sample %s cannot be stored", op.op_id)
                outcome = self._outcomes.settled(op, error)
                failures += 1
                await self._clock.sleep(retry_wait_s(failures))

    async def _result(self, op: Operation) -> Done | Exception:
        failures = 0
        while True:
            try:
                with no_stray_cancellation():
                    return await self._sample(op)
            except EngineRestartedError:
                failures += 1
                if self._access.hopeless or failures > 1:
                    await self._clock.sleep(retry_wait_s(failures))
            except EngineDiedError:
                if self._access.blame(op.op_id):
                    return died_under(op)
            except Exception as error:  # noqa: BLE001 - a job ends here; its failure is recorded
                return error

    async def _sample(self, op: Operation) -> Done:
        with self._samplers.using(op.sampler_id or ""):
            weights, shared = await self._weights(op)
            sample_op = self._jobs.sample_op(op, weights)
            if self._elsewhere is not None and shared is not None:
                result = await self._elsewhere(sample_op, shared)
                if result is not None:
                    return sampled(result)
            async with self._access.running((op.op_id,)):
                epoch = await self._access.ready()
                if weights.snapshot and not self._samplers.in_engine(op.sampler_id or ""):
                    raise EngineRestartedError("the engine was started again")
                call = self._access.engine.sample(sample_op)
                return sampled(await self._access.guard(epoch, call))

    async def _weights(self, op: Operation) -> tuple[Weights, Weights | None]:
        """What to sample from: in this engine, and anywhere, as far as it is in a file."""
        sampler_id = cast("str", op.sampler_id)
        sampler = await self._store.get_sampler(sampler_id)
        if sampler is None:
            raise failure(f"there is no sampling session {sampler_id!r}")
        if sampler.snapshot is None:
            weights = Weights(base_model=sampler.base_model, location=sampler.location)
            return weights, weights
        if not self._samplers.in_engine(sampler_id) and sampler.location is None:
            if sampler.dropped is None:
                await self._restored(sampler.model_id or "")
            sampler = await self._store.get_sampler(sampler_id) or sampler
        saved = None
        if sampler.location is not None:
            saved = Weights(base_model=sampler.base_model, location=sampler.location)
        if self._samplers.in_engine(sampler_id):
            return Weights(base_model=sampler.base_model, snapshot=sampler.snapshot), saved
        if saved is None:
            why = sampler.dropped or "their session has ended"
            raise failure(f"these sampling weights are gone: {why}")
        return saved, saved
