"""Taking over a key from another node, and handing one over: the scheduler's part.

Taking over does for one key what a start does for all: what is stored is read, and unfinished
operations are queued. The model is restored when something is to be done for it. Handing over lets
what runs end, saves the model, and forgets the key; operations that wait stay stored, so the next
owner queues them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tinkex.clock import time_limit
from tinkex.server.store.ownership import claim_key
from tinkex.server.supervision import quietly

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from tinkex.clock import Clock
    from tinkex.server.scheduler.engine_access import EngineAccess
    from tinkex.server.scheduler.loop import SchedulerLoop
    from tinkex.server.scheduler.lost_samples import LostSamples
    from tinkex.server.scheduler.model_run import ModelRun
    from tinkex.server.scheduler.outcomes import Load, Waiters
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.scheduler.samples import SampleRunner
    from tinkex.server.scheduler.upkeep import SessionEnds
    from tinkex.server.store.ownership import Claim
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Operation, StoredSampler

# How long samples may take to end before a key is handed over; then they are sent again.
_SAMPLES_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Moves keys between this scheduler and the store; holds nothing of its own."""

    store: Store
    clock: Clock
    access: EngineAccess
    runs: dict[str, ModelRun]
    loop: SchedulerLoop
    load: Load
    lost: LostSamples
    samplers: PublishedSamplers
    samples: SampleRunner
    waiters: Waiters
    ends: SessionEnds
    resume: Callable[[Sequence[Operation]], Awaitable[None]]

    async def take_over(self, claim: Claim) -> None:
        """Queue what was accepted for a key, and know its samplers."""
        self.lost.take_over(claim.key, claim.since)
        for sampler in await self._samplers(claim.key):
            await self._know(sampler)
        model = await self.store.get_model(claim.key)
        if model is not None and not model.closed and not await self._active(model.session_id):
            self.ends.add(model.session_id)
        pending = await self.store.pending(claim.key)
        new = [op for op in pending if op.op_id not in self.load]
        for op in new:
            self.load.add(op)
        await self.resume(new)

    async def _know(self, sampler: StoredSampler) -> None:
        if sampler.dropped is not None:
            if sampler.location is not None:
                await quietly(self.samplers.drop([sampler], sampler.dropped))
        elif not await self._active(sampler.session_id):
            self.ends.add(sampler.session_id)
        elif sampler.snapshot is not None:
            self.samplers.add(sampler)

    async def _active(self, session_id: str) -> bool:
        session = await self.store.get_session(session_id)
        return session is not None and session.active

    async def _samplers(self, key: str) -> Sequence[StoredSampler]:
        published = await self.store.samplers(model_id=key)
        other = await self.store.get_sampler(key)
        return [*published, *(() if other is None or claim_key(other) != key else (other,))]

    def held_keys(self) -> set[str]:
        """The keys of which anything is in memory or in the engine."""
        return {*self.runs, *self.samplers.keys()}

    async def hand_over(self, key: str, disown: Callable[[], object]) -> None:
        """Stop working for a key, save what it needs, and forget it.

        If this raises or is cancelled, the key stays here, and work for it continues. `disown` is
        called at the moment from which on nothing more is queued here for the key.
        """
        try:
            run, ids = await self._at_rest(key)
            # A request that was on its way may have begun a run meanwhile.
            while run is not self.runs.get(key):
                run, ids = await self._at_rest(key)
        except BaseException:
            run = self.runs.get(key)
            if run is not None:
                run.hold(False)
            raise
        # Nothing below can fail. Nothing is awaited before the run is removed, so a request that
        # has found this node to be the owner is in the queue by now, or is refused from here on.
        disown()
        dropped = self.samples.forget_of(ids)
        if run is not None:
            run.evict()
            self.loop.remove(run)
            await quietly(self.access.engine.drop_adapter(key))
        await self.samplers.hand_over(key)
        waiting = [] if run is None else [op.op_id for op in run.queue.waiting.values()]
        for op_id in waiting:
            self.load.remove(op_id)
        for sampler_id in ids:
            self.lost.forget(sampler_id)
        self.lost.hand_over(key)
        self.wake({*waiting, *dropped, *ids})

    async def _at_rest(self, key: str) -> tuple[ModelRun | None, set[str]]:
        """Hold a key's run, and return when nothing runs for the key and the model is saved.

        Returns the run and the ids of the key's samplers.
        """
        run = self.runs.get(key)
        if run is not None:
            run.hold(True)
        async with time_limit(self.clock, _SAMPLES_S):
            await self.samples.idle_of(await self._sampler_ids(key))
        if run is not None:
            await self.loop.at_rest(run)
            await run.save_changes()
        # Read again: what ran may have published one more.
        return run, await self._sampler_ids(key)

    async def _sampler_ids(self, key: str) -> set[str]:
        return {sampler.sampler_id for sampler in await self._samplers(key)}

    def wake(self, ids: Collection[str]) -> None:
        """Let polls look again that wait for operations or samplers with these ids."""
        self.waiters.ring_all(ids)
