"""What `/metrics` asks for at the moment it is read; nothing here may hold it up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinkex.clock import time_limit
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.server.api.call import Parts

_log = logging.getLogger(__name__)

# An engine that is busy starting answers nothing; the rest of the page does not wait for it.
_PATIENCE_S = 1.0


async def scrape(parts: Parts) -> bytes:
    """All metrics in Prometheus' text format."""
    sessions = await parts.store.sessions()
    parts.meters.show(
        queues=parts.worker.queue_lengths(),
        engine=await _engine_stats(parts),
        samples_in_flight=parts.worker.samples_in_flight,
        journal_bytes=parts.worker.journal_bytes,
        sessions_active=sum(session.active for session in sessions),
        ready=float(not parts.readiness.reasons),
    )
    return parts.meters.text()


async def _engine_stats(parts: Parts) -> Mapping[str, float]:
    stats: Mapping[str, float] = {}
    try:
        async with time_limit(parts.clock, _PATIENCE_S):
            stats = await parts.engine.stats()
    except TinkerError as error:
        _log.debug("the engine tells nothing now: %s", error)
    return stats
