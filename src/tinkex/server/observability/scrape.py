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

# An engine that is busy starting answers nothing, nor does a store that is out of reach; the rest
# of the page does not wait for them.
_PATIENCE_S = 1.0


async def scrape(parts: Parts) -> bytes:
    """All metrics in Prometheus' text format."""
    parts.meters.show(
        queues=parts.worker.queue_lengths(),
        engine=await _engine_stats(parts),
        samples_in_flight=parts.worker.samples_in_flight,
        journal_bytes=parts.worker.journal_bytes,
        ready=float(not parts.readiness.reasons),
        **await _sessions(parts),
    )
    return parts.meters.text()


async def _sessions(parts: Parts) -> Mapping[str, float]:
    found: Mapping[str, float] = {}
    try:
        async with time_limit(parts.clock, _PATIENCE_S):
            found = {"sessions_active": await parts.store.count_sessions(active=True)}
    except TinkerError as error:
        _log.debug("the store tells nothing now: %s", error)
    return found


async def _engine_stats(parts: Parts) -> Mapping[str, float]:
    stats: Mapping[str, float] = {}
    try:
        async with time_limit(parts.clock, _PATIENCE_S):
            stats = await parts.engine.stats()
    except TinkerError as error:
        _log.debug("the engine tells nothing now: %s", error)
    return stats
