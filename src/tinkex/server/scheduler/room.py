"""The quota of a tenant: one sum over everything that is kept for it, and what is on its way."""

from __future__ import annotations

from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import anyio

from tinkex.errors import RequestFailedError
from tinkex.server.store.records import Reserved, occupied
from tinkex.server.supervision import quietly

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from tinkex.clock import Clock
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Occupied, Part, StoredCheckpoint

# How many checkpoints a refusal names, and of how many the largest are chosen.
_NAMED: Final = 3
_LOOKED_AT: Final = 1000
_RELEASING: Final = "releasing reserved room"

_HOW_TO_FREE: Final[Mapping[Part, str]] = {
    "checkpoints": "delete checkpoints, or give them a TTL",
    "samplers": "end sessions that sample",
    "losses": "end the sessions that uploaded losses",
    "requests": "wait until queued requests have run",
    "results": "fetch results; they are deleted some hours later",
    "sessions": "wait until old sessions are forgotten, and send less metadata",
    "runs": "send less metadata with new runs",
}


class NoRoomError(RequestFailedError):
    """Something does not fit now, but would after something else is deleted or has expired."""

    code = "no_room"


class Room:
    """Accepts what fits. Used from one event loop."""

    def __init__(
        self,
        store: Store,
        samplers: PublishedSamplers,
        clock: Clock,
        *,
        max_stored_bytes: int,
        max_checkpoints: int,
        shared: bool = False,
    ) -> None:
        self._store = store
        self._samplers = samplers
        self._clock = clock
        self._most = max_stored_bytes
        self._most_checkpoints = max_checkpoints
        # Whether other nodes write for the same tenants, so that the store has all reservations.
        self._shared = shared
        # Mutable state: reservations by id, and a lock for each owner that has some: a sum and what
        # it decides must not be torn apart.
        self._held: dict[str, Reserved] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def used(self, owner: str) -> dict[Part, int]:
        """The bytes of each part of what is kept for an owner."""
        kept = await self._store.kept(owner)
        sizes: dict[Part, int] = {part: found.size_bytes for part, found in kept.items()}
        return sizes if self._shared else self._with_samplers(owner, sizes)

    def _with_samplers(self, owner: str, sizes: Mapping[Part, int]) -> dict[Part, int]:
        """Without samplers whose file is still to be deleted: that may wait for the engine."""
        return {**sizes, "samplers": self._samplers.size_bytes(owner)}

    @asynccontextmanager
    async def reserved(
        self, owner: str, size_bytes: int, *, replaced_bytes: int = 0, checkpoints: int = 0
    ) -> AsyncGenerator[Reservation]:
        """Hold room while something is written, or refuse it with what could be deleted.

        Samplers that may go make room. What is written is stored within `Reservation.spent`.
        Raises `NoRoomError`, or another error for what could never fit.
        """
        wanted = Reserved(
            reservation_id=uuid4().hex,
            owner=owner,
            size_bytes=max(size_bytes, 1),
            checkpoints=0 if replaced_bytes else checkpoints,
        )
        taken = Reservation(self, wanted, replaced_bytes)
        try:
            async with self._locked(owner):
                await self._take(taken, wanted)
            yield taken
        finally:
            with anyio.CancelScope(shield=True):
                await quietly(self._release(taken), _RELEASING)

    async def _take(self, taken: Reservation, wanted: Reserved) -> None:
        """Hold what is wanted, or refuse it if it does not fit even without samplers that may go.

        What the reservation held before is replaced.
        """
        if wanted.size_bytes > self._most:
            raise RequestFailedError(
                f"this takes {wanted.size_bytes} bytes, more than the {self._most} that a tenant "
                "may keep here in all (max_stored_bytes)",
                None,
                "user",
            )
        most = self._most + taken.replaced_bytes
        # From here on: a call that is cancelled may have reserved it.
        taken.held = wanted
        found = await self._reserve(wanted, most)
        excess = found.size_bytes + wanted.size_bytes - most
        if excess > 0:
            await self._samplers.free(wanted.owner, excess)
            found = await self._reserve(wanted, most)
        if not found.leaves(wanted, most, self._most_checkpoints):
            raise await self._refusal(found, taken, wanted, most)

    async def _reserve(self, wanted: Reserved, max_bytes: int) -> Occupied:
        if self._shared:
            return await self._store.reserve(
                wanted, max_bytes=max_bytes, max_checkpoints=self._most_checkpoints
            )
        kept = await self._store.kept(wanted.owner)
        found = occupied(kept, self._held.values(), wanted)
        found = replace(found, kept=self._with_samplers(wanted.owner, found.kept))
        if found.leaves(wanted, max_bytes, self._most_checkpoints):
            self._held[wanted.reservation_id] = wanted
        return found

    async def _refusal(
        self, found: Occupied, taken: Reservation, wanted: Reserved, max_bytes: int
    ) -> NoRoomError:
        if found.size_bytes + wanted.size_bytes > max_bytes:
            now = self._clock.wall()
            kept = await self._store.checkpoints(owner=wanted.owner, live_at=now, limit=_LOOKED_AT)
            total = found.size_bytes - taken.replaced_bytes
            return no_room(found.kept, total, self._most, kept)
        return NoRoomError(
            f"you have {found.checkpoints} checkpoints; a tenant may have {self._most_checkpoints} "
            "here (max_checkpoints): delete some, or give new ones a TTL",
            None,
            "user",
        )

    async def _release(self, taken: Reservation) -> None:
        held = taken.held
        if held is not None and self._shared:
            await self._store.unreserve(held.reservation_id)
        elif held is not None:
            self._held.pop(held.reservation_id, None)
        taken.held = None

    @asynccontextmanager
    async def _locked(self, owner: str) -> AsyncGenerator[None]:
        lock = self._locks[owner]
        try:
            async with lock:
                yield
        finally:
            if not (lock.locked() or lock.statistics().tasks_waiting):
                self._locks.pop(owner, None)

    @asynccontextmanager
    async def settled(self, taken: Reservation, size_bytes: int) -> AsyncGenerator[None]:
        """Check what something really takes up, and count it by its record from here on."""
        async with self._locked(taken.wanted.owner):
            if taken.held is None or size_bytes > taken.held.size_bytes:
                await self._take(taken, replace(taken.wanted, size_bytes=size_bytes))
            yield
            # The record counts from here on. If this fails, it is tried again by `reserved`.
            await quietly(self._release(taken), _RELEASING)


class Reservation:
    """Room that something on its way holds."""

    def __init__(self, room: Room, wanted: Reserved, replaced_bytes: int) -> None:
        self._room = room
        self.wanted = wanted
        self.replaced_bytes = replaced_bytes
        # Mutable state: what it holds now, or has asked for.
        self.held: Reserved | None = None

    def spent(self, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Store the record of what was written within this; raises if it does not fit after all."""
        return self._room.settled(self, size_bytes)


def no_room(
    used: Mapping[Part, int], total: int, most: int, kept: Iterable[StoredCheckpoint] = ()
) -> NoRoomError:
    """Says what takes up the room, and what could be deleted."""
    some: list[Part] = [part for part, size in used.items() if size]
    parts = sorted(some, key=lambda part: -used[part])
    shown = ", ".join(f"{part} {used[part]}" for part in parts) or "nothing yet"
    largest = sorted(kept, key=lambda c: (-c.size_bytes, c.created_at))[:_NAMED]
    named = ", ".join(f"{c.path} ({c.size_bytes} bytes)" for c in largest)
    steps = [_HOW_TO_FREE[part] for part in parts[:2]]
    if named:
        steps.append(f"the largest checkpoints are {named}")
    return NoRoomError(
        f"what is kept for you takes up {total} of the {most} bytes a tenant may keep here "
        f"(max_stored_bytes), so {max(most - total, 0)} more would fit. In bytes: {shown}. To free "
        f"some: {'; '.join(steps) or 'ask the operator of this server for more room'}",
        None,
        "user",
    )
