"""When a model's state is written down, so that a crash has little to do again, and how.

A snapshot stands for every operation up to its turn; their requests are forgotten then. Two
places take turns, so that there is a whole snapshot at every moment and never a third one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinkex.errors import EngineDiedError
from tinkex.server.scheduler.finishing import retry_wait_s
from tinkex.server.scheduler.residents import EngineRestartedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.clock import Clock
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Residents
    from tinkex.server.scheduler.rows import Rows
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation

# What a model is made of; the rest reads it and changes nothing. A load is its own snapshot.
CHANGING = ("create_model", "forward_backward", "optim_step")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a crash may have to do again."""

    ops: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What a model has done since its last snapshot, and since when."""

    since: float
    ops: int = 0
    size_bytes: int = 0
    failures: int = 0
    not_before: float = 0.0

    def due(self, limits: Limits, now: float) -> bool:
        """Whether enough has come together."""
        enough = (
            self.ops >= limits.ops
            or self.size_bytes >= limits.size_bytes
            or now >= self.since + limits.seconds
        )
        return enough and self.ops > 0 and now >= self.not_before


def places(model_id: str) -> tuple[str, str]:
    """The two locations that hold a model's snapshots in turn."""
    return f"snapshot/{model_id}@0", f"snapshot/{model_id}@1"


class Snapshots:
    """Counts what models do and writes them down; whoever calls `take` keeps others off."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        residents: Residents,
        published: Published,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._store = store
        self._rows = rows
        self._residents = residents
        self._published = published
        self._clock = clock
        self._limits = limits
        # Mutable state: the models that have changed since their last snapshot.
        self._progress: dict[str, Progress] = {}

    def __len__(self) -> int:
        """How many models have changed since their last snapshot."""
        return len(self._progress)

    @property
    def size_bytes(self) -> int:
        """The bodies of what a crash would run again."""
        return sum(progress.size_bytes for progress in self._progress.values())

    def note(self, op: Operation) -> None:
        """Count an operation that succeeded."""
        if op.kind in CHANGING and op.model_id is not None:
            old = self._progress.get(op.model_id) or Progress(self._clock.now())
            self._progress[op.model_id] = replace(
                old, ops=old.ops + 1, size_bytes=old.size_bytes + len(op.body)
            )

    def restored(self, model_id: str, operations: Iterable[Operation]) -> None:
        """Count afresh what was run again."""
        self._progress.pop(model_id, None)
        for op in operations:
            if op.outcome is not None and op.outcome.error is None:
                self.note(op)

    def due(self, model_id: str) -> bool:
        """Whether a model is to be written down now."""
        progress = self._progress.get(model_id)
        return (
            progress is not None
            and progress.due(self._limits, self._clock.now())
            and not self._published.unsaved(model_id)
            and self._residents.has_model(model_id)
        )

    def changed(self, model_id: str) -> bool:
        """Whether a model has anything that its snapshot has not."""
        return model_id in self._progress and self._residents.has_model(model_id)

    def forget(self, model_id: str) -> None:
        """A model is over."""
        self._progress.pop(model_id, None)

    async def try_take(self, model_id: str, seq_id: int) -> None:
        """Write a model down, or try again some time later."""
        try:
            await self.take(model_id, seq_id)
        except (EngineDiedError, EngineRestartedError):
            return  # the restore counts afresh
        except Exception as error:  # noqa: BLE001 - training goes on without this snapshot
            _log.error("no snapshot of %s: %s", model_id, error)
            old = self._progress.get(model_id)
            if old is not None:
                failures = old.failures + 1
                rest = self._clock.now() + retry_wait_s(failures)
                self._progress[model_id] = replace(old, failures=failures, not_before=rest)

    async def take(self, model_id: str, seq_id: int) -> None:
        """Write a model down as it is after request `seq_id`, and forget what led there."""
        model = await self._store.get_model(model_id)
        if model is None:
            return
        first, second = places(model_id)
        location = second if model.snapshot_location == first else first
        engine, generation = self._residents.engine, self._residents.generation()
        save = engine.save_adapter(model_id, location, optimizer=True)
        await self._residents.guard(generation, save)
        await self._rows.change_model(model_id, snapshot_location=location, snapshot_seq=seq_id)
        self._progress.pop(model_id, None)
        await self._store.trim_journal(model_id, seq_id)
        if model.snapshot_location is not None:
            await engine.delete_saved(model.snapshot_location)

    async def delete(self, model_id: str) -> None:
        """Delete what there may be of a model that is over."""
        for location in places(model_id):
            await self._residents.engine.delete_saved(location)
