"""What happens when a session is over: its samples end, its weights go, its checkpoints stay.

Models stay until what was accepted for them has run. A crash in the middle is made good at the
next start, because only the last step closes a model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.errors import StorageError
from tinkex.server.scheduler.published import location_of
from tinkex.server.scheduler.recovery import is_closed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tinkex.server.scheduler.lanes import Lanes
    from tinkex.server.scheduler.lost import LostSamples
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Residents
    from tinkex.server.scheduler.rows import Rows
    from tinkex.server.scheduler.sample_runs import SampleRuns
    from tinkex.server.scheduler.saves import Saves
    from tinkex.server.scheduler.snapshots import Snapshots
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Sampler

_log = logging.getLogger(__name__)


class Endings:
    """Cleans up after sessions."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        lanes: Lanes,
        samples: SampleRuns,
        residents: Residents,
        published: Published,
        snapshots: Snapshots,
        saves: Saves,
        lost: LostSamples,
    ) -> None:
        self._store = store
        self._rows = rows
        self._lanes = lanes
        self._samples = samples
        self._residents = residents
        self._published = published
        self._snapshots = snapshots
        self._saves = saves
        self._lost = lost
        # Mutable state: models to be dropped when their lane is empty; sessions and models whose
        # clean-up met a broken storage and is tried again.
        self._leaving: set[str] = set()
        self._open_sessions: set[str] = set()
        self._open_models: set[str] = set()

    def __len__(self) -> int:
        """How many models are on their way out."""
        return len(self._leaving) + len(self._open_sessions) + len(self._open_models)

    async def resume(self) -> None:
        """Go on with what a crash interrupted."""
        over = {s.session_id for s in await self._store.sessions() if not s.active}
        for model in await self._store.models():
            if model.session_id in over and not is_closed(model):
                self._leaving.add(model.model_id)

    async def end_session(self, session_id: str) -> None:
        """Free what a session held: samples at once, models when their operations have run."""
        self._open_sessions.add(session_id)
        for op in self._samples.of_session(session_id):
            await self._samples.cancel(op)
        await self._drop_samplers(await self._store.samplers(session_id))
        for model in await self._store.models(session_id=session_id):
            if not is_closed(model):
                self._leaving.add(model.model_id)
        self._open_sessions.discard(session_id)

    async def retry(self) -> None:
        """Try again what a broken storage left open."""
        self._leaving |= self._open_models
        self._open_models.clear()
        for session_id in list(self._open_sessions):
            await self.end_session(session_id)

    def ready(self) -> list[str]:
        """The models that leave now; each is named once."""
        found = [(model_id, self._lanes.get(model_id)) for model_id in self._leaving]
        ready = [m for m, lane in found if lane is None or not (lane.busy or lane.waiting)]
        self._leaving.difference_update(ready)
        return ready

    async def leave(self, model_id: str) -> None:
        """Drop a model of which nothing is asked any more."""
        lane = self._lanes.get(model_id)
        last = max(0 if lane is None else lane.last_seq, 0)
        self._lanes.remove(model_id)
        self._residents.remove_model(model_id)
        self._snapshots.forget(model_id)
        await _quietly(self._residents.engine.drop_adapter(model_id))
        await _quietly(self._snapshots.delete(model_id))
        try:
            await self._close(model_id, last)
        except StorageError as error:
            _log.error("model %s is closed later: %s", model_id, error)
            self._open_models.add(model_id)

    async def _close(self, model_id: str, last: int) -> None:
        model = await self._store.get_model(model_id)
        if model is not None:
            samplers = await self._store.samplers(model.session_id)
            await self._drop_samplers([s for s in samplers if s.model_id == model_id])
            last = max(last, model.snapshot_seq)
            await self._store.trim_journal(model_id, last)
            await self._rows.change_model(model_id, snapshot_location=None, snapshot_seq=last)

    async def _drop_samplers(self, samplers: Sequence[Sampler]) -> None:
        for sampler in samplers:
            self._lost.forget(sampler.sampler_id)
            if sampler.snapshot is not None:
                await self._drop_published(sampler, sampler.snapshot)
            elif sampler.model_path is not None and sampler.location is not None:
                checkpoint = await self._store.get_checkpoint(sampler.model_path)
                if checkpoint is None or checkpoint.location != sampler.location:
                    # It was kept for this sampler when its checkpoint was deleted.
                    await _quietly(self._saves.forget_location(sampler.location))

    async def _drop_published(self, sampler: Sampler, snapshot: str) -> None:
        self._published.forget(sampler.sampler_id)
        if self._residents.has_published(snapshot):
            self._residents.remove_published(snapshot)
            await _quietly(self._residents.engine.drop_snapshot(snapshot))
        if sampler.location is not None:
            await _quietly(self._residents.engine.delete_saved(location_of(sampler.sampler_id)))
            await self._store.put_sampler(replace(sampler, location=None))


async def _quietly(cleanup: Awaitable[object]) -> None:
    """Freeing something may fail without anybody having to know but the log."""
    try:
        await cleanup
    except Exception:  # noqa: BLE001 - the clean-up ends here
        _log.exception("clean-up failed")
