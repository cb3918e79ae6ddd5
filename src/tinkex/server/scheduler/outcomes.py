"""How operations end: the outcome is stored, counted, and polls that wait for it are answered.

While the storage fails, an outcome is kept in memory and stored later: the operation counts as
unfinished, so nothing that depends on it runs before it is durable.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import InputError, RequestFailedError, StorageError
from tinkex.server.store.records import OperationOutcome, UsageEntry, changed
from tinkex.server.supervision import no_stray_cancellation, retry_wait_s
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence

    from tinkex.clock import Clock
    from tinkex.server.observability.meters import Meters
    from tinkex.server.scheduler.jobs import Done
    from tinkex.server.scheduler.lost_samples import LostSamples
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Operation, OpKind

CANCELLED = OperationOutcome(error="The operation was cancelled.", category="user")

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Waiters:
    """Long polls: each waits on an event and looks again when it is set, without a timer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Mutable state: per key, one event for all that wait for it now, and how many do.
        self._bells: dict[Hashable, anyio.Event] = {}
        self._listeners: dict[Hashable, int] = defaultdict(int)
        self._closed = False

    def close(self) -> None:
        """Wake all waiters, now and from now on: the server shuts down."""
        self._closed = True
        for bell in self._bells.values():
            bell.set()

    def ring(self, key: Hashable) -> None:
        """Wake all that wait for a key."""
        bell = self._bells.pop(key, None)
        if bell is not None:
            bell.set()

    def ring_all(self, ids: Collection[str]) -> None:
        """Wake all that wait for operations or samplers with these ids."""
        for key in list(self._bells):
            # An operation's id, or a sampler's with the number of the copy.
            names = cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,)
            if names[0] in ids:
                self.ring(cast("Hashable", key))

    async def until(
        self, key: Hashable, look: Callable[[], Awaitable[T | None]], timeout_s: float
    ) -> T | None:
        """What `look` finds, asked now and after each ring; None after `timeout_s`."""
        # The first look needs no timer: most polls of a busy server find their result at once.
        found = await look()
        if found is not None or timeout_s <= 0 or self._closed:
            return found
        self._listeners[key] += 1
        try:
            async with time_limit(self._clock, timeout_s):
                while found is None and not self._closed:
                    # Taken before `look`, so that a ring during it is not missed.
                    bell = self._bells.setdefault(key, anyio.Event())
                    found = await look()
                    if found is None:
                        await bell.wait()
        finally:
            self._leave(key)
        return found

    def _leave(self, key: Hashable) -> None:
        self._listeners[key] -= 1
        if not self._listeners[key]:
            del self._listeners[key]
            self._bells.pop(key, None)


@dataclass(frozen=True, slots=True)
class Amount:
    """What one tenant has in flight; `queued_bytes` are the bodies of its operations."""

    operations: int = 0
    samples: int = 0
    queued_bytes: int = 0


class Load:
    """Counts of operations in flight, by owner. Used from one event loop, without locks."""

    def __init__(self) -> None:
        # Mutable state: what is in flight, and what that adds up to per owner. Counting by id
        # makes an operation that ends twice count once.
        self._in_flight: dict[str, tuple[str, Amount]] = {}
        self._sums: dict[str, Amount] = defaultdict(Amount)

    def add(self, op: Operation) -> None:
        """Count an accepted operation."""
        if op.op_id not in self._in_flight:
            sample = op.kind == "sample"
            amount = Amount(int(not sample), int(sample), len(op.body))
            self._in_flight[op.op_id] = (op.owner, amount)
            self._change(op.owner, amount, 1)

    def __contains__(self, op_id: object) -> bool:
        """Whether an operation is accepted and not finished."""
        return op_id in self._in_flight

    def remove(self, op_id: str) -> None:
        """Count an operation no more: it ended, or was forgotten."""
        owner, amount = self._in_flight.pop(op_id, ("", None))
        if amount is not None:
            self._change(owner, amount, -1)

    def clear(self) -> None:
        """Forget everything, as a restart does."""
        self._in_flight.clear()
        self._sums.clear()

    def of(self, owner: str) -> Amount:
        """What a tenant has in flight."""
        return self._sums.get(owner, Amount())

    @property
    def queued_bytes(self) -> int:
        """The bodies of everything in flight."""
        return sum(each.queued_bytes for each in self._sums.values())

    def of_others(self, owner: str) -> int:
        """How many training operations all the other tenants have in flight."""
        return sum(each.operations for name, each in self._sums.items() if name != owner)

    def _change(self, owner: str, by: Amount, sign: int) -> None:
        now = self._sums[owner]
        changed = Amount(
            now.operations + sign * by.operations,
            now.samples + sign * by.samples,
            now.queued_bytes + sign * by.queued_bytes,
        )
        if changed == Amount():
            del self._sums[owner]
        else:
            self._sums[owner] = changed


class Outcomes:
    """Records outcomes; has no state of its own."""

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

    def settled(self, op: Operation, result: Done | Exception) -> OperationOutcome:
        """A job's result, or what it raised, as it is stored."""
        if isinstance(result, Exception):
            return _failed(op, result)
        try:
            body = self._encode(op.kind, result.value)
        except Exception as error:  # noqa: BLE001 - a result that cannot be encoded is a failure
            return _failed(op, error)
        return OperationOutcome(body=body, size_bytes=len(body), usage=result.usage)

    async def start(self, op_ids: Sequence[str], at: float) -> None:
        """Note that operations run; it is not worth failing for."""
        try:
            with no_stray_cancellation():
                await self._store.start(op_ids, at)
        except Exception as error:  # noqa: BLE001 - only a note
            _log.warning("the start of %d operations is not noted: %s", len(op_ids), error)

    async def finish(self, op: Operation, outcome: OperationOutcome) -> bool:
        """Record an outcome, however long the storage takes; False when there was one."""
        if op.started_at is not None:
            queue_s = max(op.started_at - op.created_at, 0.0)
            outcome = changed(outcome, usage=outcome.usage + Usage(queue_s=queue_s))
        failures, surprises = 0, 0
        while True:
            try:
                with no_stray_cancellation():
                    return await self._record(op, outcome)
            except StorageError as error:
                failures += 1
                _log.error("the outcome of %s cannot be stored yet: %s", op.op_id, error)
                await self._clock.sleep(retry_wait_s(failures))
            except Exception:
                # It may have been stored all the same, which a second try finds out.
                surprises += 1
                if surprises > 1:
                    raise

    def is_unfinished(self, op: Operation) -> bool:
        """Whether an accepted operation has no outcome yet."""
        return op.op_id in self._load

    def found_finished(self, op: Operation) -> None:
        """The store has an outcome that was taken for lost."""
        self._load.remove(op.op_id)
        self._waiters.ring(op.op_id)

    async def _record(self, op: Operation, outcome: OperationOutcome) -> bool:
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

    async def _usage(self, op: Operation, outcome: OperationOutcome, now: float) -> UsageEntry:
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


def _failed(op: Operation, error: Exception) -> OperationOutcome:
    if isinstance(error, RequestFailedError):
        return OperationOutcome(error=error.message, category=error.category)
    if isinstance(error, InputError):
        return OperationOutcome(error=str(error), category="user")
    _log.error("operation %s (%s) failed", op.op_id, op.kind, exc_info=error)
    return OperationOutcome(error=f"{type(error).__name__}: {error}", category="server")
