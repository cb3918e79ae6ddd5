"""Forgets sessions that ended long ago, a little at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.store.base import Store

_log = logging.getLogger(__name__)

EVERY_S: Final = 600.0
_RECORDS: Final = 1000
# Between two parts others use the store.
_PAUSE_S: Final = 1.0


async def prune_history(store: Store, clock: Clock, history_s: float) -> None:
    """Forget what ended more than `history_s` ago, until cancelled."""
    while True:
        await clock.sleep(EVERY_S)
        try:
            while await store.prune(clock.wall() - history_s, _RECORDS):
                await clock.sleep(_PAUSE_S)
        except Exception:  # noqa: BLE001 - one round ends here; the next may do better
            _log.exception("old sessions could not be forgotten")
