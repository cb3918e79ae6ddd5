"""Ends what nobody attends to, and forgets what ended long ago, a little at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tinkex.types import SessionCancelled

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.settings import Settings
    from tinkex.server.store.base import Store

_log = logging.getLogger(__name__)

EVERY_S: Final = 600.0
_AT_ONCE: Final = 1000
# Between two parts others use the store.
_PAUSE_S: Final = 1.0


class History:
    """Keeps what the store holds short; `run()` is its one long-lived task."""

    def __init__(self, store: Store, worker: Worker, clock: Clock, settings: Settings) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._settings = settings

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S)
            try:
                await self._end_unattended()
                await self._prune()
            except Exception:  # noqa: BLE001 - one sweep ends here; the next may do better
                _log.exception("old sessions could not be forgotten")

    async def _end_unattended(self) -> None:
        """End the sessions of clients that send no heartbeats, when no result is left to read.

        The oldest clients get one for every sample. One with a model goes on: nobody else knows
        whether its client comes back.
        """
        status = SessionCancelled(detail="a client without heartbeats, not seen for long")
        before = self._clock.wall() - self._settings.result_ttl_s
        while found := await self._store.unattended_sessions(before, _AT_ONCE):
            for session in found:
                if await self._worker.changes.end_session(session, status):
                    await self._worker.end_session(session.session_id)
            await self._clock.sleep(_PAUSE_S)

    async def _prune(self) -> None:
        while await self._store.prune(self._clock.wall() - self._settings.history_s, _AT_ONCE):
            await self._clock.sleep(_PAUSE_S)
