"""Weights published for sampling by a model: in the engine at once, on disk soon after.

Until they are on disk a crash publishes them again from the model's journal, which is why no
snapshot of that model may pass them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from tinkex.errors import EngineDiedError
from tinkex.server.scheduler.finishing import retry_wait_s
from tinkex.server.scheduler.residents import EngineRestartedError

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.scheduler.residents import Generation, Residents
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Sampler

_log = logging.getLogger(__name__)


def location_of(sampler_id: str) -> str:
    """Where a published snapshot is kept."""
    return f"sampler/{sampler_id}"


class Published:
    """Publishes, and writes down what was published; `run()` is its one long-lived task."""

    def __init__(self, store: Store, residents: Residents, clock: Clock) -> None:
        self._store = store
        self._residents = residents
        self._clock = clock
        # Mutable state: what is in the engine only, oldest first, and a bell for every change.
        self._unsaved: dict[str, Sampler] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        """How many snapshots are in the engine only."""
        return len(self._unsaved)

    def unsaved(self, model_id: str) -> bool:
        """Whether a crash now would need the model's journal for its samplers."""
        return any(sampler.model_id == model_id for sampler in self._unsaved.values())

    async def publish(self, sampler: Sampler, generation: Generation) -> None:
        """Freeze a model as it is now for a sampler."""
        model_id, snapshot = sampler.model_id or "", sampler.snapshot or sampler.sampler_id
        engine = self._residents.engine
        await self._residents.guard(generation, engine.publish(model_id, snapshot))
        self._residents.add_published(snapshot, generation)

    def keep(self, sampler: Sampler) -> None:
        """Write a published snapshot down soon."""
        if sampler.location is None:
            self._unsaved[sampler.sampler_id] = sampler
            self._ring()

    async def saved(self, model_id: str) -> None:
        """Return when nothing of a model is in the engine only."""
        while self.unsaved(model_id):
            await self._changed.wait()

    def forget(self, sampler_id: str) -> None:
        """A sampler's session is over."""
        if self._unsaved.pop(sampler_id, None) is not None:
            self._ring()

    async def run(self) -> None:
        """Write down one after another until cancelled."""
        failures = 0
        while True:
            while not self._unsaved:
                await self._changed.wait()
            sampler = next(iter(self._unsaved.values()))
            try:
                await self._save(sampler)
                failures = 0
            except (EngineDiedError, EngineRestartedError):
                # Its model's restore publishes it again.
                self.forget(sampler.sampler_id)
            except Exception as error:  # noqa: BLE001 - one attempt ends here; there is another
                failures += 1
                _log.error("weights of %s cannot be kept yet: %s", sampler.sampler_id, error)
                await self._clock.sleep(retry_wait_s(failures))

    async def _save(self, sampler: Sampler) -> None:
        snapshot = sampler.snapshot or sampler.sampler_id
        location = location_of(sampler.sampler_id)
        if not self._residents.has_published(snapshot):
            raise EngineRestartedError("the engine has lost it")
        engine, generation = self._residents.engine, self._residents.generation()
        await self._residents.guard(generation, engine.save_snapshot(snapshot, location))
        if sampler.sampler_id in self._unsaved:
            await self._store.put_sampler(replace(sampler, location=location))
            self.forget(sampler.sampler_id)
        else:
            await engine.delete_saved(location)

    def _ring(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
