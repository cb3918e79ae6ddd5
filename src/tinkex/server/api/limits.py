"""What one tenant may have at a time, and the refusal when it has that much.

Official clients wait after a 429 and send again, some for ever. So only limits that are freed
without the client's help are refused with it, and never a request that was accepted before.
A full quota is one of them for work that can wait: results and old sessions are deleted after some
time. A copy or an import must not wait for that: see `no_room_reply` in `api.errors`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio

from tinkex.server.api.errors import FULL, full_detail, refuse
from tinkex.server.scheduler.room import NoRoomError, no_room
from tinkex.server.store.records import LimitReached

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Hashable

    from tinkex.clock import Clock
    from tinkex.errors import APIStatusError
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import (
        Model,
        Operation,
        Part,
        StoredLoss,
        StoredSampler,
        StoredSession,
    )

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

_RATE_BURST_S = 2.0
_CHANGES_BURST_S = 200.0
# Models of clients that send no heartbeats count for this long after their last request.
_SILENT_MODEL_S = 3600.0

_MOST_NAMES = 4096

# How long a sum of what is kept is used, how soon it is read again before a refusal, and after
# which part of the quota was added to it.
_RECOUNT_S = 10.0
_RECOUNT_SOON_S = 1.0
_RECOUNT_PART = 0.01

_ROWS: dict[str, tuple[str, str]] = {
    "max_sessions": ("sessions", "close one, or wait until one ends"),
    "max_kept_sessions": ("sessions, past ones too", "wait until the oldest are forgotten"),
    "max_models": ("models", "close a session, or unload a model"),
    "max_runs": ("training runs", "ask the operator of this server to raise it"),
    "max_samplers": ("samplers in this session", "start another session"),
    "max_losses": ("custom losses in this session", "start another session"),
}


@dataclass(slots=True)
class _Kept:
    """What is kept for a tenant, read `at` a time, and what was accepted since."""

    parts: dict[Part, int]
    at: float
    added: int = 0

    @property
    def until(self) -> float:
        return self.at + _RECOUNT_S

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class TenantLimits:
    """The tenants' limits; what they have is counted by the worker and the store."""

    def __init__(
        self, settings: ServerSettings, clock: Clock, store: Store, worker: Worker
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._worker = worker
        # Mutable state: what is kept for tenants, as far as it was read lately.
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        changes = settings.max_changes_per_s
        self._changes = Throttle(clock, per_s=changes, burst=max(changes * _CHANGES_BURST_S, 1.0))
        rate = settings.max_requests_per_s
        self._rate = None
        if rate is not None:
            self._rate = Throttle(clock, per_s=rate, burst=max(rate * _RATE_BURST_S, 1.0))

    def request(self, owner: str) -> None:
        """Any request but a heartbeat."""
        wait_s = self._rate.take(owner) if self._rate is not None else 0.0
        if wait_s > 0:
            most = self._settings.max_requests_per_s
            raise refuse(
                429,
                f"A tenant may send {most:g} requests per second here (max_requests_per_s); "
                "send this one again later.",
                headers={"retry-after": str(math.ceil(min(wait_s, 60.0)))},
            )

    def change(self, owner: str) -> None:
        """A request that changes something and leaves a line in the audit log."""
        wait_s = self._changes.take(owner)
        if wait_s > 0:
            raise refuse(
                429,
                f"A tenant may make {self._settings.max_changes_per_s:g} such changes per second "
                "here (max_changes_per_s); send this one again later.",
                headers={"retry-after": str(math.ceil(min(wait_s, 60.0)))},
            )

    async def add_session(self, session: StoredSession) -> None:
        """Store one more session; those of clients without heartbeats never report their end."""
        await self.storage(session.owner)
        reached = await self._store.add_session(
            session,
            max_sessions=self._settings.max_sessions if session.heartbeats else None,
            max_kept_sessions=self._settings.max_kept_sessions,
        )
        if reached is not None:
            raise self._reached(reached)

    async def add_model(self, model: Model) -> Model:
        """Store one more model; one that is known is returned."""
        if not model.closed:
            await self.storage(model.owner)
        kept = await self._store.add_model(
            model,
            max_models=None if model.closed else self._settings.max_models,
            max_runs=self._settings.max_runs,
            silent_since=self._clock.wall() - _SILENT_MODEL_S,
        )
        if isinstance(kept, LimitReached):
            raise self._reached(kept)
        return kept

    async def add_sampler(self, sampler: StoredSampler) -> StoredSampler:
        """Store one more sampler of a session; one that is known is returned."""
        kept = await self._store.add_sampler(sampler, max_samplers=self._settings.max_samplers)
        if isinstance(kept, LimitReached):
            raise self._reached(kept)
        return kept

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        """Store one more custom loss of a session; one that is known is returned."""
        known = await self._store.get_loss(loss.loss_id)
        if known is not None:
            return known  # also when it would not fit any more
        size_bytes = loss.size_bytes
        reserved = self._worker.room.reserved(loss.owner, size_bytes)
        try:
            async with reserved as room, room.spent(size_bytes):
                kept = await self._store.add_loss(loss, max_losses=self._settings.max_losses)
        except NoRoomError as full:
            raise _full(full) from full
        if isinstance(kept, LimitReached):
            raise self._reached(kept)
        return kept

    async def storage(self, owner: str, more_bytes: int = 0) -> None:
        """Refuse more work of a tenant that has filled its quota.

        The sum is read every few seconds, and what was accepted since then is added to it.
        """
        now, most = self._clock.now(), self._settings.max_stored_bytes
        known = self._kept.get(owner)
        if known is None or now >= known.until or known.added > most * _RECOUNT_PART:
            known = await self._recount(owner, now)
        if known.total + known.added >= most:
            if now >= known.at + _RECOUNT_SOON_S:
                known = await self._recount(owner, now)
            if known.total + known.added >= most:
                raise _full(no_room(known.parts, known.total + known.added, most))
        known.added += more_bytes

    async def _recount(self, owner: str, now: float) -> _Kept:
        # Replaced before the sum is read: of many requests at a time only one reads it.
        old = self._kept.get(owner) or _Kept({}, now)
        self._kept[owner] = _Kept(old.parts, now, added=old.added)
        self._kept.move_to_end(owner)
        while len(self._kept) > _MOST_NAMES:
            self._kept.popitem(last=False)
        found = self._kept[owner] = _Kept(await self._worker.room.used(owner), now)
        return found

    def _reached(self, reached: LimitReached) -> APIStatusError:
        what, step = _ROWS[reached.setting]
        most = getattr(self._settings, reached.setting)
        return _over(reached.setting, most, reached.have, what, step, 10)

    def sample(self, owner: str) -> None:
        """One more sample."""
        most, have = self._settings.max_samples_in_flight, self._worker.load.of(owner).samples
        if have >= most:
            raise _over("max_samples_in_flight", most, have, "samples in flight", "slow down", 1)

    def training(self, owner: str, model_id: str, seq_id: int, size_bytes: int) -> None:
        """One more training operation; one that queued operations wait for is always accepted."""
        if self._worker.is_waited_for(model_id, seq_id):
            return
        have = self._worker.load.of(owner)
        most, most_bytes = self._settings.max_queued_ops, self._settings.max_queued_bytes
        step = "wait for results before sending more"
        if have.operations >= most:
            raise _over("max_queued_ops", most, have.operations, "operations in flight", step, 2)
        # The first one fits whatever its size: it could not become smaller by waiting.
        if have.operations and have.queued_bytes + size_bytes > most_bytes:
            held = have.queued_bytes
            raise _over("max_queued_bytes", most_bytes, held, "bytes in flight", step, 2)

    def queue_state(self, op: Operation) -> tuple[QueueState, str | None]:
        """Why an unfinished operation waits, for the client that polls for it."""
        if op.state == "running":
            return "active", None
        have, most = self._worker.load.of(op.owner).operations, self._settings.max_training_ops
        if op.kind != "sample" and have > most:
            reason = (
                f"{have} operations of yours are in flight, more than the {most} that a tenant "
                "should have here (max_training_ops); they run in order"
            )
            return "paused_rate_limit", reason
        others = op.kind == "sample" or self._worker.load.of_others(op.owner)
        if others and self._clock.wall() - op.created_at >= self._settings.busy_after_s:
            return "paused_capacity", "the server is busy; this request waits for its turn"
        return "active", None


def _over(
    name: str, most: int, have: int, what: str, next_step: str, wait_s: int
) -> APIStatusError:
    fits = max(most - have, 0)
    return refuse(
        429,
        f"You have {have} {what}; a tenant may have {most} here ({name}), so {fits} more would "
        f"fit. To go on, {next_step}.",
        headers={"retry-after": str(wait_s)},
    )


def _full(why: NoRoomError) -> APIStatusError:
    """The refusal of more work while the quota is full."""
    return refuse(429, full_detail(why), headers=dict(FULL))


class Throttle:
    """Allows `per_s` on average and `burst` at once, for each name apart."""

    def __init__(self, clock: Clock, *, per_s: float, burst: float) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        # Mutable state: (what is left, at which time) per name, longest unused first. A name that
        # is forgotten starts with a full bucket, which only helps it.
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, name: Hashable) -> float:
        """Take one; returns 0, or after how many seconds to try again."""
        now = self._clock.now()
        left, since = self._left.get(name, (self._burst, now))
        left = min(left + (now - since) * self._per_s, self._burst)
        wait_s = 0.0 if left >= 1 else (1 - left) / self._per_s if self._per_s > 0 else math.inf
        self._left[name] = (left if wait_s else left - 1, now)
        self._left.move_to_end(name)
        while len(self._left) > _MOST_NAMES:
            self._left.popitem(last=False)
        return wait_s


class BodyRoom:
    """Room for `most` bytes of large bodies of each tenant; more wait, and one always fits.

    A few kilobytes of zstd may be a body of many megabytes, and a tenant may send many at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Mutable state: the bytes that each tenant has taken, and who waits, first come first.
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, anyio.Event]]] = {}

    @asynccontextmanager
    async def of(self, owner: str, size: int) -> AsyncGenerator[None]:
        """Take room for a body, when there is enough."""
        size = min(size, self._most)
        if owner in self._waiting or not self._take(owner, size):
            await self._wait(owner, size)
        try:
            yield
        finally:
            self._give(owner, size)

    def _take(self, owner: str, size: int) -> bool:
        taken = self._taken.get(owner, 0) + size
        if taken > self._most:
            return False
        self._taken[owner] = taken
        return True

    async def _wait(self, owner: str, size: int) -> None:
        mine = size, anyio.Event()
        self._waiting.setdefault(owner, deque()).append(mine)
        try:
            await mine[1].wait()
        except BaseException:
            if mine[1].is_set():
                self._give(owner, size)  # cancelled after its turn had come
            else:
                self._waiting[owner].remove(mine)
                self._serve(owner)
            raise

    def _give(self, owner: str, size: int) -> None:
        left = self._taken[owner] - size
        if left:
            self._taken[owner] = left
        else:
            del self._taken[owner]
        self._serve(owner)

    def _serve(self, owner: str) -> None:
        """Let in those that fit now, in their order."""
        waiting = self._waiting.get(owner)
        while waiting and self._take(owner, waiting[0][0]):
            waiting.popleft()[1].set()
        if waiting is not None and not waiting:
            del self._waiting[owner]
