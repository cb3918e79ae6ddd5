"""What the server does on its own: end silent sessions, expire checkpoints, drop old results."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinkex.types import SessionCancelled

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.store.base import Store


_log = logging.getLogger(__name__)


class Upkeep:
    """Looks around every `interval_s`; `run()` is its one long-lived task."""

    def __init__(
        self,
        store: Store,
        worker: Worker,
        clock: Clock,
        *,
        interval_s: float,
        session_timeout_s: float,
        result_ttl_s: float,
    ) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._interval_s = interval_s
        self._session_timeout_s = session_timeout_s
        self._result_ttl_s = result_ttl_s

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await self._clock.sleep(self._interval_s)
            try:
                await self.sweep()
            except Exception:  # noqa: BLE001 - one sweep ends here; the next may do better
                _log.exception("upkeep failed")

    async def sweep(self) -> None:
        """One look around."""
        await self._worker.retry_endings()
        now = self._clock.wall()
        for session in await self._store.sessions(active=True):
            silent_s = now - session.last_seen_at
            if session.heartbeats and silent_s > self._session_timeout_s:
                status = SessionCancelled(detail=f"no heartbeat for {silent_s:.0f} s")
                if await self._worker.rows.end_session(session, status):
                    await self._worker.end_session(session.session_id)
        for checkpoint in await self._store.checkpoints(expired_at=now):
            # The record last: it says what is still to be deleted if this fails.
            await self._worker.saves.forget_location(checkpoint.location)
            await self._worker.rows.delete_checkpoint(checkpoint)
        old = now - self._result_ttl_s
        await self._store.drop_results_before(old)
        await self._store.forget_operations_before(old)
