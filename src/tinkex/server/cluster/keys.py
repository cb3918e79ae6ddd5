"""The keys that this node owns: how it takes them over, hands them over and forgets them.

While a key changes, requests for it wait for the end of that, and one task makes the change.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

from tinkex.server.supervision import quietly

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.server.cluster.roster import Roster
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.store.ownership import Claim
    from tinkex.server.store.protocol import Store

# So many keys are taken over, or handed over, at a time.
_AT_ONCE: Final = 8

_log = logging.getLogger(__name__)


class OwnedKeys:
    """Used from one event loop, after `start`."""

    def __init__(
        self,
        store: Store,
        roster: Roster,
        clock: Clock,
        *,
        lease_s: float,
        look_soon: Callable[[], None],
    ) -> None:
        self._store = store
        self._roster = roster
        self._clock = clock
        self._lease_s = lease_s
        self._look_soon = look_soon
        self._slots = anyio.Semaphore(_AT_ONCE)
        self._worker: Worker | None = None
        self._group: TaskGroup | None = None
        # Mutable state: the keys that are taken over; those that are being taken over, handed over
        # or forgotten, with an event for the end of that; and how many changed.
        self.owned: dict[str, Claim] = {}
        self._changing: dict[str, anyio.Event] = {}
        self.taken_over = 0
        self.handed_over = 0

    def start(self, worker: Worker, group: TaskGroup) -> None:
        """Take keys over from now on."""
        self._worker, self._group = worker, group

    def has(self, key: str) -> bool:
        """Whether this node owns a key, and that does not change."""
        return key in self.owned and key not in self._changing

    def change_of(self, key: str) -> anyio.Event | None:
        """What is set when the present change of a key ends."""
        return self._changing.get(key)

    def attend(self, claim: Claim) -> None:
        """Start what a claim of this node needs."""
        if self._group is None or claim.key in self._changing:
            return
        if claim.key not in self.owned:
            self._group.start_soon(self._quietly_take_over, claim)
        elif claim.wanted is not None or self._roster.node.state == "draining":
            self._group.start_soon(self._quietly_hand_over, claim.key)

    async def take_over(self, claim: Claim) -> None:
        """Read what there is of a key that was given to this node."""
        if self._worker is None:
            return
        await self._worker.started.wait()
        # Nothing is awaited between this and the note of the change: one task makes it.
        if claim.key in self._changing or claim.key in self.owned:
            return
        async with self._change(claim.key):
            await self._store.adopt(claim)
            self.owned[claim.key] = claim
            try:
                await self._worker.handover.take_over(claim)
                self.taken_over += 1
            except BaseException:
                del self.owned[claim.key]
                self._store.give_up(claim)
                raise

    async def hand_over_all(self) -> None:
        """Hand over what other nodes can take."""
        async with anyio.create_task_group() as group:
            for key in list(self.owned):
                group.start_soon(self._quietly_hand_over, key)

    async def _quietly_take_over(self, claim: Claim) -> None:
        async with self._slots:
            await quietly(self.take_over(claim), f"taking over {claim.key}")

    async def _quietly_hand_over(self, key: str) -> None:
        async with self._slots:
            await quietly(self._hand_over(key), f"handing over {key}")

    async def _hand_over(self, key: str) -> None:
        worker = self._worker
        if worker is None or not self.has(key):
            return
        claim = await self._store.get_claim(key)
        if claim is None or claim.node_id != self._roster.node_id:
            return
        target = self._roster.handover_target(claim)
        # Again, because it may have changed during the await above.
        if target is None or not self.has(key):
            return
        async with self._change(key):
            owned = self.owned[key]
            await worker.handover.hand_over(key, lambda: self.owned.pop(key, None))
            worker.handover.wake(self._store.give_up(owned))
            try:
                moved = await self._store.reassign(owned, target.node_id)
            except Exception:  # noqa: BLE001 - it is taken over again
                _log.exception("%s could not be given to %s", key, target.name)
                moved = None
            if moved is None:
                self._look_soon()  # taken over again, if it is still this node's
            else:
                self.handed_over += 1
                _log.info("%s moved to node %s", key, target.name)

    async def release_ended(self) -> None:
        """Forget the claims of keys of ended sessions that nothing is left of."""
        worker = self._worker
        if worker is None:
            return
        held = worker.handover.held_keys()
        for key, claim in list(self.owned.items()):
            if key in held or not await self._is_over(key, claim) or key in self._changing:
                continue
            async with self._change(key):
                still_held = key in worker.handover.held_keys()
                if not still_held and await self._store.release(claim):
                    del self.owned[key]
                    self._store.give_up(claim)

    async def ended_sessions(self) -> set[str]:
        """The sessions of this node's keys that have ended."""
        found: set[str] = set()
        for key in list(self.owned):
            record = await self._store.get_model(key) or await self._store.get_sampler(key)
            if record is not None and not await self._is_active(record.session_id):
                found.add(record.session_id)
        return found

    async def _is_over(self, key: str, claim: Claim) -> bool:
        # A key begins with its session, which is in memory: of most keys nothing else is read.
        if await self._is_active(key.rsplit(":", 2)[0]):
            return False
        model = await self._store.get_model(key)
        if model is not None and not model.closed:
            return False
        sampler = await self._store.get_sampler(key) if model is None else None
        record = model or sampler
        if record is None:
            # Claimed for a request that was refused, or is still on its way.
            return self._clock.wall() - claim.since > 2 * self._lease_s
        return not await self._is_active(record.session_id)

    async def _is_active(self, session_id: str) -> bool:
        session = await self._store.get_session(session_id)
        return session is not None and session.active

    @asynccontextmanager
    async def _change(self, key: str) -> AsyncGenerator[None]:
        ended = self._changing[key] = anyio.Event()
        try:
            yield
        finally:
            del self._changing[key]
            ended.set()
