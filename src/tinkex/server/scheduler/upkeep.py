"""What the server does on its own: end sessions, expire checkpoints, delete old records."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from tinkex.server.scheduler.samplers import SESSION_OVER, quietly
from tinkex.types import SessionCancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tinkex.clock import Clock
    from tinkex.server.scheduler.checkpoints import Checkpoints
    from tinkex.server.scheduler.lost_samples import LostSamples
    from tinkex.server.scheduler.model_run import ModelRun
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store

# How often old records are deleted, how many at once, and the pause between two such batches, in
# which other requests use the store.
PRUNE_INTERVAL_S = 600.0
_PRUNE_BATCH = 1000
_PRUNE_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class SessionEnds:
    """Frees what ended sessions held, in the background; `run()` is its one long-lived task.

    Samplers go, checkpoints stay, models stay until what was accepted for them has run. A crash
    in the middle is made good at the next start: what is left says to which session it belonged.
    """

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        samplers: PublishedSamplers,
        lost: LostSamples,
        runs: Mapping[str, ModelRun],
        run_of: Callable[[str], Awaitable[ModelRun]],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._lost = lost
        self._runs = runs
        self._run_of = run_of
        # Mutable state: sessions to clean up after, in order, and an event for one more.
        self._ended: dict[str, None] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        """How many sessions are not cleaned up after."""
        return len(self._ended)

    def add(self, session_id: str) -> None:
        """Clean up after a session soon."""
        self._ended[session_id] = None
        self._changed.set()

    def retry(self) -> None:
        """Try again what a failing storage has stopped."""
        self._changed.set()

    async def run(self) -> None:
        """Clean up until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            for session_id in list(self._ended):
                try:
                    await self._clean_up(session_id)
                    self._ended.pop(session_id, None)
                except Exception as error:  # noqa: BLE001 - tried again at the next sweep
                    _log.error("session %s is cleaned up later: %s", session_id, error)

    async def _clean_up(self, session_id: str) -> None:
        samplers = await self._store.samplers(session_id)
        for sampler in samplers:
            self._lost.forget(sampler.sampler_id)
        held = [s for s in samplers if s.dropped is None or s.location is not None]
        await self._samplers.drop(held, SESSION_OVER)
        for sampler in held:
            run = self._runs.get(sampler.model_id or "")
            if run is not None:
                run.unsaved_samplers.forget([sampler])
            if sampler.snapshot is None and sampler.location and sampler.model_path:
                checkpoint = await self._store.get_checkpoint(sampler.model_path)
                if checkpoint is None or checkpoint.location != sampler.location:
                    # It was kept for this sampler when its checkpoint was deleted.
                    await quietly(self._checkpoints.forget_location(sampler.location))
        for model in await self._store.models(session_id=session_id):
            if not model.closed:
                (await self._run_of(model.model_id)).leave()


class Upkeep:
    """Ends sessions, expires checkpoints and deletes old records; `run()` never returns."""

    def __init__(
        self, store: Store, worker: Worker, clock: Clock, settings: ServerSettings
    ) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._settings = settings

    async def run(self) -> None:
        """Sweep often, and prune the history now and then, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._repeat, self.sweep, self._settings.upkeep_interval_s)
            group.start_soon(self._repeat, self.prune, PRUNE_INTERVAL_S)

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            try:
                await work()
            except Exception:  # noqa: BLE001 - this round ends here; the next may succeed
                _log.exception("upkeep failed")

    async def sweep(self) -> None:
        """End silent sessions, delete expired checkpoints and old results."""
        await self._worker.retry_endings()
        now = self._clock.wall()
        for session in await self._store.sessions(active=True):
            silent_s = now - session.last_seen_at
            if session.heartbeats and silent_s > self._settings.session_timeout_s:
                status = SessionCancelled(detail=f"no heartbeat for {silent_s:.0f} s")
                await self._worker.end_session(session, status)
        for checkpoint in await self._store.checkpoints(expired_at=now):
            # The record last: if this fails, the next sweep finds by it what is left to delete.
            await self._worker.checkpoints.forget_location(checkpoint.location)
            await self._worker.changes.delete_checkpoint(checkpoint)
        old = now - self._settings.result_ttl_s
        await self._store.drop_results_before(old)
        await self._store.forget_operations_before(old)

    async def prune(self) -> None:
        """End sessions of clients without heartbeats, and delete what ended `history_s` ago."""
        await self._end_unattended()
        while await self._store.prune(self._clock.wall() - self._settings.history_s, _PRUNE_BATCH):
            await self._clock.sleep(_PRUNE_PAUSE_S)

    async def _end_unattended(self) -> None:
        """End the sessions of clients that send no heartbeats, when no result is left to read.

        The oldest clients open a session for every sample. A session with a model stays open,
        because its client may still return.
        """
        status = SessionCancelled(detail="a client without heartbeats, not seen for long")
        before = self._clock.wall() - self._settings.result_ttl_s
        while found := await self._store.unattended_sessions(before, _PRUNE_BATCH):
            for session in found:
                await self._worker.end_session(session, status)
            await self._clock.sleep(_PRUNE_PAUSE_S)
