"""The quota of a tenant: one sum over everything that is kept for it, and what is on its way."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from tinkex.clock import Clock
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Part, StoredCheckpoint

# How many checkpoints a refusal names, and of how many the largest are chosen.
_NAMED: Final = 3
_LOOKED_AT: Final = 1000

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
        # Whether other nodes have samplers of the same tenants.
        self._shared = shared
        # Mutable state: bytes and checkpoints of each owner that are being written, and a lock for
        # each owner that has some: a sum and what it decides must not be torn apart.
        self._bytes: Counter[str] = Counter()
        self._checkpoints: Counter[str] = Counter()
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def used(self, owner: str) -> dict[Part, int]:
        """The bytes of each part of what is kept for an owner."""
        kept = await self._store.kept(owner)
        sizes: dict[Part, int] = {part: found.size_bytes for part, found in kept.items()}
        if not self._shared:
            # Without those whose file is still to be deleted: that may have to wait for the engine.
            sizes["samplers"] = self._samplers.size_bytes(owner)
        return sizes

    @asynccontextmanager
    async def reserved(
        self, owner: str, size_bytes: int, *, replaced_bytes: int = 0, checkpoints: int = 0
    ) -> AsyncGenerator[Reservation]:
        """Hold room while something is written, or refuse it with what could be deleted.

        Samplers that may go make room. What is written is stored within `Reservation.spent`.
        Raises `NoRoomError`, or another error for what could never fit.
        """
        taken = Reservation(self, owner, replaced_bytes, checkpoints)
        try:
            async with self._locked(owner):
                await self.check(owner, max(size_bytes, 1), replaced_bytes, checkpoints)
                taken.take(max(size_bytes, 1))
            yield taken
        finally:
            taken.release()

    async def check(
        self, owner: str, size_bytes: int, replaced_bytes: int, checkpoints: int
    ) -> None:
        """Refuse what does not fit, even without samplers that may go."""
        if size_bytes > self._most:
            raise RequestFailedError(
                f"this takes {size_bytes} bytes, more than the {self._most} that a tenant may keep "
                "here in all (max_stored_bytes)",
                None,
                "user",
            )
        used = await self.used(owner)
        excess = self._total(owner, used) - replaced_bytes + size_bytes - self._most
        if excess > 0:
            await self._samplers.free(owner, excess)
            used = await self.used(owner)
        total = self._total(owner, used) - replaced_bytes
        if total + size_bytes > self._most:
            now = self._clock.wall()
            kept = await self._store.checkpoints(owner=owner, live_at=now, limit=_LOOKED_AT)
            raise no_room(used, total, self._most, kept)
        if checkpoints and not replaced_bytes:
            await self._check_count(owner)

    async def _check_count(self, owner: str) -> None:
        kept = await self._store.kept(owner)
        have = kept["checkpoints"].count + self._checkpoints[owner]
        if have >= self._most_checkpoints:
            raise NoRoomError(
                f"you have {have} checkpoints; a tenant may have {self._most_checkpoints} here "
                "(max_checkpoints): delete some, or give new ones a TTL",
                None,
                "user",
            )

    def _total(self, owner: str, used: Mapping[Part, int]) -> int:
        return sum(used.values()) + self._bytes[owner]

    @asynccontextmanager
    async def _locked(self, owner: str) -> AsyncGenerator[None]:
        lock = self._locks[owner]
        try:
            async with lock:
                yield
        finally:
            if not (lock.locked() or lock.statistics().tasks_waiting):
                self._locks.pop(owner, None)

    def add(self, owner: str, size_bytes: int, checkpoints: int) -> None:
        """Count what is being written, or no longer is."""
        for counter, amount in ((self._bytes, size_bytes), (self._checkpoints, checkpoints)):
            counter[owner] += amount
            if not counter[owner]:
                del counter[owner]

    @asynccontextmanager
    async def settled(self, taken: Reservation, size_bytes: int) -> AsyncGenerator[None]:
        """Check what something really takes up, and count it by its record from here on."""
        async with self._locked(taken.owner):
            held = taken.size_bytes
            taken.release()
            if size_bytes > held:
                replaced = taken.replaced_bytes
                await self.check(taken.owner, size_bytes, replaced, taken.checkpoints)
            yield


class Reservation:
    """Room that something on its way holds."""

    def __init__(self, room: Room, owner: str, replaced_bytes: int, checkpoints: int) -> None:
        self._room = room
        self.owner = owner
        self.replaced_bytes = replaced_bytes
        self.checkpoints = checkpoints
        # Mutable state: what it holds now.
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold that much."""
        self.size_bytes = size_bytes
        self._room.add(self.owner, size_bytes, self.checkpoints)

    def release(self) -> None:
        """Hold nothing any more."""
        if self.size_bytes:
            self._room.add(self.owner, -self.size_bytes, -self.checkpoints)
            self.size_bytes = 0

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
