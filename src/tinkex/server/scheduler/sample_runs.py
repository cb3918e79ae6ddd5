"""Samples from acceptance to outcome: which weights, when they start, and starting again.

A sample whose engine died is started again here; only a restart of the server loses it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import anyio

from tinkex.engine.base import Weights
from tinkex.errors import EngineDiedError
from tinkex.server.scheduler.batches import died_under
from tinkex.server.scheduler.checks import failure
from tinkex.server.scheduler.finishing import CANCELLED, retry_wait_s
from tinkex.server.scheduler.guests import Guests
from tinkex.server.scheduler.jobs import sampled
from tinkex.server.scheduler.residents import EngineRestartedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.server.scheduler.finishing import Finishing
    from tinkex.server.scheduler.jobs import Done, Jobs
    from tinkex.server.scheduler.load import Load
    from tinkex.server.scheduler.residents import Residents
    from tinkex.server.scheduler.shares import Shares
    from tinkex.server.scheduler.suspects import Suspects
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation


_log = logging.getLogger(__name__)


class SampleRuns:
    """The samples in flight; `bring_back` restores a model in the engine."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        jobs: Jobs,
        residents: Residents,
        suspects: Suspects,
        finishing: Finishing,
        load: Load,
        shares: Shares,
        bring_back: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._jobs = jobs
        self._residents = residents
        self._suspects = suspects
        self._finishing = finishing
        self._load = load
        self._shares = shares
        self._bring_back = bring_back
        # Mutable state: where samples run, once there is such a place, those that do, and a bell
        # for the end of the last one.
        self._group: TaskGroup | None = None
        self._ended = anyio.Event()
        self._running: dict[str, tuple[Operation, anyio.CancelScope]] = {}
        self.guests = Guests(load, shares, self.start)

    def __len__(self) -> int:
        """Samples accepted and not finished."""
        return len(self._shares) + len(self._running) + len(self.guests)

    @property
    def waiting(self) -> int:
        """Samples that have not started."""
        return len(self._shares)

    def is_running(self, op_id: str) -> bool:
        """Whether a sample has started."""
        return op_id in self._running

    async def idle(self) -> None:
        """Return when none runs."""
        while self._running:
            await self._ended.wait()

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
                if self.guests.begin(op.op_id):
                    continue
                scope = anyio.CancelScope()
                self._running[op.op_id] = (op, scope)
                self._group.start_soon(self._run, op, scope)

    async def cancel(self, op: Operation) -> bool:
        """Withdraw a sample; False when it has ended."""
        self._shares.withdraw(op)
        cancelled = await self._finishing.finish(op, CANCELLED)
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
        self.guests.begin_all()
        scopes = [scope for _, scope in self._running.values()]
        self._running.clear()
        for scope in scopes:
            scope.cancel()

    async def _run(self, op: Operation, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                now = self._clock.wall()
                op = replace(op, state="running", started_at=now)
                await self._finishing.start([op.op_id], now)
                outcome = self._finishing.settled(op, await self._result(op))
                await self._finishing.finish(op, outcome)
            except Exception:  # noqa: BLE001 - a sample ends here, and nobody else with it
                _log.exception("sample %s did not end as it should", op.op_id)
            finally:
                self._suspects.clear(op.op_id)
                # After a restart the same id may already belong to the sample sent again.
                if self._running.get(op.op_id, (op, None))[1] is scope:
                    del self._running[op.op_id]
                    self._shares.done(op.op_id)
                    self.start()
                    if not self._running:
                        self._ended.set()
                        self._ended = anyio.Event()

    async def _result(self, op: Operation) -> Done | Exception:
        failures = 0
        while True:
            try:
                return await self._sample(op)
            except EngineRestartedError:
                failures += 1
                if self._residents.hopeless or failures > 1:
                    await self._clock.sleep(retry_wait_s(failures))
            except EngineDiedError:
                if self._suspects.blame(op.op_id):
                    return died_under(op)
            except Exception as error:  # noqa: BLE001 - a job ends here; its failure is recorded
                return error

    async def _sample(self, op: Operation) -> Done:
        weights = await self._weights(op)
        async with self._suspects.running((op.op_id,)):
            generation = await self._residents.ready()
            if weights.snapshot and not self._residents.has_published(weights.snapshot):
                raise EngineRestartedError("the engine was started again")
            call = self._residents.engine.sample(self._jobs.sample_op(op, weights))
            return sampled(await self._residents.guard(generation, call))

    async def _weights(self, op: Operation) -> Weights:
        sampler = await self._store.get_sampler(cast("str", op.sampler_id))
        if sampler is None:
            raise failure(f"there is no sampling session {op.sampler_id!r}")
        name, snapshot = sampler.base_model, sampler.snapshot
        if snapshot is None:
            return Weights(base_model=name, location=sampler.location)
        if not self._residents.has_published(snapshot) and sampler.location is None:
            await self._bring_back(sampler.model_id or "")
        if self._residents.has_published(snapshot):
            return Weights(base_model=name, snapshot=snapshot)
        sampler = await self._store.get_sampler(sampler.sampler_id) or sampler
        if sampler.location is None:
            raise failure("these sampling weights are gone: their session has ended")
        return Weights(base_model=name, location=sampler.location)
