"""What the server does on its own: end sessions, expire checkpoints, delete old records."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from tinkex.server.scheduler.samplers import SESSION_OVER
from tinkex.server.store.ownership import claim_key
from tinkex.server.store.records import AuditEntry
from tinkex.server.supervision import quietly
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
    from tinkex.server.store.ownership import Claim
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import StoredCheckpoint, StoredSession

# A sweep that begins so much too late, or on another date, says that the server was away.
_AWAY_S = 10.0

# How often old records are deleted, how many at once, and the pause between two such batches, in
# which other requests use the store.
PRUNE_INTERVAL_S = 600.0
_PRUNE_BATCH = 1000
_PRUNE_PAUSE_S = 1.0
_DAY_S = 24 * 3600.0

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
        owned: Mapping[str, Claim] | None = None,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._lost = lost
        self._runs = runs
        self._run_of = run_of
        self._owned = owned
        # Mutable state: sessions to clean up after, in order, and an event for one more.
        self._ended: dict[str, None] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        """How many sessions are not cleaned up after."""
        return len(self._ended)

    def add(self, session_id: str) -> None:
        """Clean up after a session soon, if it is over."""
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
                # What fails is tried again at the next sweep.
                if await quietly(self._clean_up(session_id), f"cleaning up after {session_id}"):
                    self._ended.pop(session_id, None)

    async def _clean_up(self, session_id: str) -> None:
        session = await self._store.get_session(session_id)
        if session is not None and session.active:
            return  # its end was not stored
        samplers = [
            sampler
            for sampler in await self._store.samplers(session_id)
            if await self._is_ours(claim_key(sampler))
        ]
        for sampler in samplers:
            self._lost.forget(sampler.sampler_id)
        held = [sampler for sampler in samplers if self._samplers.holds(sampler)]
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
            if not model.closed and (self._owned is None or model.model_id in self._owned):
                (await self._run_of(model.model_id)).leave()

    async def _is_ours(self, key: str) -> bool:
        """Whether this node cleans up a sampler's key: it owns it, or no node ever has."""
        if self._owned is None or key in self._owned:
            return True
        return await self._store.get_claim(key) is None


class Upkeep:
    """Ends sessions, expires checkpoints and deletes old records; `run()` never returns.

    What is shared with other nodes is done only while this one `leads`.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        clock: Clock,
        settings: ServerSettings,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._settings = settings
        self._leads = leads
        # Mutable state: when the last sweep ended, and on which date.
        self._swept: tuple[float, float] | None = None

    async def run(self) -> None:
        """Sweep often, and prune the history now and then, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._repeat, self.sweep, self._settings.upkeep_interval_s)
            # A short history is not kept for much longer than it says.
            often = max(self._settings.history_s, self._settings.upkeep_interval_s)
            group.start_soon(self._repeat, self.prune, min(PRUNE_INTERVAL_S, often))

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            await quietly(work(), "upkeep")

    async def sweep(self) -> None:
        """End silent sessions, delete expired checkpoints and old results."""
        try:
            await self._worker.retry_endings()
            if self._leads():
                await self._excuse_silence()
                await self._sweep()
            # Each node has results of its own in memory.
            old = self._clock.wall() - self._settings.result_ttl_s
            await self._store.drop_results_before(old)
            await self._store.forget_operations_before(old)
        finally:
            self._swept = (self._clock.now(), self._clock.wall())

    async def _excuse_silence(self) -> None:
        """Count every session as seen if the server could not hear it, or its date has changed."""
        if self._swept is None:
            return
        elapsed_s = self._clock.now() - self._swept[0]
        by_date_s = self._clock.wall() - self._swept[1]
        late_s = elapsed_s - self._settings.upkeep_interval_s
        if late_s > _AWAY_S or abs(by_date_s - elapsed_s) > _AWAY_S:
            _log.warning(
                "the server was away, or its date was set (%.0f s have passed, %.0f s by date): "
                "the silence of sessions counts from now on",
                elapsed_s,
                by_date_s,
            )
            await self._store.touch_sessions(self._clock.wall())

    async def _sweep(self) -> None:
        now = self._clock.wall()
        before = now - self._settings.session_timeout_s
        for session in await self._store.silent_sessions(before):
            silent_s = now - session.last_seen_at
            if session.heartbeats and silent_s > self._settings.session_timeout_s:
                detail = f"no heartbeat for {silent_s:.0f} s"
                await quietly(self._time_out(session, detail), f"ending {session.session_id}")
        for checkpoint in await self._store.checkpoints(expired_at=now):
            await quietly(self._expire(checkpoint), f"deleting {checkpoint.path}")

    async def _time_out(self, session: StoredSession, detail: str) -> None:
        """End one session; if that fails, the next sweep tries it again."""
        if not await self._worker.end_session(session, SessionCancelled(detail=detail)):
            return  # its client has just ended it
        await self._store.audit(
            AuditEntry(
                at=self._clock.wall(),
                owner=session.owner,
                topic="sessions",
                event="session_timed_out",
                details={"session_id": session.session_id, "detail": detail},
            )
        )

    async def _expire(self, checkpoint: StoredCheckpoint) -> None:
        # The record last: if this fails, the next sweep finds by it what is left to delete.
        await self._worker.checkpoints.forget_location(checkpoint.location)
        await self._store.delete_checkpoint(checkpoint)

    async def prune(self) -> None:
        """End sessions of clients without heartbeats, and delete what ended `history_s` ago."""
        if not self._leads():
            return
        await quietly(self._end_unattended(), "ending sessions without heartbeats")
        while await self._store.prune(self._clock.wall() - self._settings.history_s, _PRUNE_BATCH):
            await self._clock.sleep(_PRUNE_PAUSE_S)
        oldest = self._clock.wall() - self._settings.audit_days * _DAY_S
        while await self._store.forget_audit_before(oldest, _PRUNE_BATCH):
            await self._clock.sleep(_PRUNE_PAUSE_S)

    async def _end_unattended(self) -> None:
        """End the sessions of clients that send no heartbeats, when no result is left to read.

        The oldest clients open a session for every sample, so these ends are not in the audit log.
        A session with a model stays open, because its client may still return.
        """
        status = SessionCancelled(detail="a client without heartbeats, not seen for long")
        before = self._clock.wall() - self._settings.result_ttl_s
        while found := await self._store.unattended_sessions(before, _PRUNE_BATCH):
            ended = [
                await quietly(self._worker.end_session(each, status), f"ending {each.session_id}")
                for each in found
            ]
            if not any(ended):
                return
            await self._clock.sleep(_PRUNE_PAUSE_S)
