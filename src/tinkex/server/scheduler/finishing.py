"""How operations end: an outcome in the store, a count, and a ring for whoever waits.

While the storage is broken an outcome is kept in memory and tried again: the operation counts
as unfinished, so nothing that builds on it runs before it is safe.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.errors import InputError, RequestFailedError, StorageError
from tinkex.server.store.records import Outcome, UsageEntry
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.server.observe.meters import Meters
    from tinkex.server.scheduler.jobs import Done
    from tinkex.server.scheduler.load import Load
    from tinkex.server.scheduler.lost import LostSamples
    from tinkex.server.scheduler.waiters import Waiters
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import Operation, OpKind

CANCELLED = Outcome(error="The operation was cancelled.", category="user")

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0

_log = logging.getLogger(__name__)


def retry_wait_s(failures: int) -> float:
    """How long to leave a storage alone that has failed so many times in a row."""
    return min(_FIRST_RETRY_S * 2.0 ** (failures - 1), _LONGEST_RETRY_S)


class Finishing:
    """Records outcomes; holds nothing but what it was given."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        waiters: Waiters,
        meters: Meters,
        load: Load,
        lost: LostSamples,
        encode: Callable[[OpKind, object], bytes],
    ) -> None:
        self._store = store
        self._clock = clock
        self._waiters = waiters
        self._meters = meters
        self._load = load
        self._lost = lost
        self._encode = encode

    def settled(self, op: Operation, result: Done | Exception) -> Outcome:
        """A job's result, or what it raised, as it is stored."""
        if isinstance(result, Exception):
            return _failed(op, result)
        try:
            body = self._encode(op.kind, result.value)
        except Exception as error:  # noqa: BLE001 - a result nobody can be told is a failure
            return _failed(op, error)
        return Outcome(body=body, size_bytes=len(body), usage=result.usage)

    async def start(self, op_ids: Sequence[str], at: float) -> None:
        """Note that operations run; it is not worth failing for."""
        try:
            await self._store.start(op_ids, at)
        except StorageError as error:
            _log.warning("the start of %d operations is not noted: %s", len(op_ids), error)

    async def finish(self, op: Operation, outcome: Outcome) -> bool:
        """Record an outcome, however long the storage takes; False when there was one."""
        if op.started_at is not None:
            queue_s = max(op.started_at - op.created_at, 0.0)
            outcome = replace(outcome, usage=outcome.usage + Usage(queue_s=queue_s))
        failures = 0
        while True:
            try:
                return await self._record(op, outcome)
            except StorageError as error:
                failures += 1
                _log.error("the outcome of %s cannot be stored yet: %s", op.op_id, error)
                await self._clock.sleep(retry_wait_s(failures))

    async def _record(self, op: Operation, outcome: Outcome) -> bool:
        now = self._clock.wall()
        usage = await self._usage(op, outcome, now) if outcome.error is None else None
        first = await self._store.finish(op.op_id, outcome, now, usage)
        self._load.remove(op.op_id)
        if first:
            self._meters.ended(op, outcome, now)
        self._waiters.ring(op.op_id)
        if op.sampler_id is not None:
            self._lost.ended(op)
            self._waiters.ring((op.sampler_id, op.clone))
        return first

    async def _usage(self, op: Operation, outcome: Outcome, now: float) -> UsageEntry:
        source = (
            await self._store.get_sampler(op.sampler_id)
            if op.sampler_id is not None
            else await self._store.get_model(op.model_id or "")
        )
        session = await self._store.get_session(op.session_id)
        return UsageEntry(
            at=now,
            owner=op.owner,
            session_id=op.session_id,
            base_model=None if source is None else source.base_model,
            project_id=None if session is None else session.project_id,
            kind=op.kind,
            usage=outcome.usage,
        )


def _failed(op: Operation, error: Exception) -> Outcome:
    if isinstance(error, RequestFailedError):
        return Outcome(error=error.message, category=error.category)
    if isinstance(error, InputError):
        return Outcome(error=str(error), category="user")
    _log.error("operation %s (%s) failed", op.op_id, op.kind, exc_info=error)
    return Outcome(error=f"{type(error).__name__}: {error}", category="server")
