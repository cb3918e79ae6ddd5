"""Weights published for sampling: in the engine at once, in a file soon after, until dropped.

A published sampler is dropped with its session. Before that it is dropped only when its tenant is
out of room: the least recently used first, never the newest of a model and none that is in use.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from tinkex.errors import EngineDiedError
from tinkex.server.scheduler.engine_access import EngineRestartedError
from tinkex.server.store.ownership import claim_key
from tinkex.server.supervision import no_stray_cancellation, quietly, retry_wait_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence

    from tinkex.clock import Clock
    from tinkex.server.scheduler.engine_access import EngineAccess, Epoch
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import StoredSampler

SESSION_OVER = "their session has ended"
_NO_ROOM = "the server deleted them to make room for newer ones of their owner"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Published:
    """A published sampler, when it was last used, and how many samples use it now."""

    sampler: StoredSampler
    used_at: float
    in_use: int = 0
    epoch: Epoch | None = None


class PublishedSamplers:
    """All published samplers of sessions that are alive. Used from one event loop."""

    def __init__(self, store: Store, access: EngineAccess, clock: Clock) -> None:
        self._store = store
        self._access = access
        self._clock = clock
        # Mutable state: published samplers by id, oldest first; dropped ones whose
        # file could not be deleted; the ends of saves that run.
        self._live: dict[str, _Published] = {}
        self._undeleted: dict[str, StoredSampler] = {}
        self._saving: dict[str, anyio.Event] = {}

    def __len__(self) -> int:
        return len(self._live) + len(self._undeleted)

    def add(self, sampler: StoredSampler) -> None:
        """Note a sampler that the store has, or what has changed of it."""
        known = self._live.get(sampler.sampler_id)
        if known is None:
            self._live[sampler.sampler_id] = _Published(sampler, self._clock.now())
        else:
            known.sampler = sampler

    def in_engine(self, sampler_id: str) -> bool:
        """Whether the present engine has a published snapshot."""
        known = self._live.get(sampler_id)
        return known is not None and known.epoch == self._access.epoch()

    def holds(self, sampler: StoredSampler) -> bool:
        """Whether anything is left of a sampler besides its record: in memory, or in a file."""
        is_live = sampler.sampler_id in self._live
        return is_live or sampler.dropped is None or sampler.location is not None

    async def publish(self, sampler: StoredSampler, epoch: Epoch) -> None:
        """Freeze a model as it is now for a sampler."""
        model_id, snapshot = sampler.model_id or "", sampler.snapshot or sampler.sampler_id
        await self._access.guard(epoch, self._access.engine.publish(model_id, snapshot))
        self.add(sampler)
        self._live[sampler.sampler_id].epoch = epoch

    async def withdraw(self, sampler: StoredSampler) -> None:
        """Undo a `publish` of which there is no record."""
        self._live.pop(sampler.sampler_id, None)
        await quietly(self._access.engine.drop_snapshot(sampler.snapshot or sampler.sampler_id))

    async def save(self, sampler: StoredSampler) -> None:
        """Write a published snapshot to its file, and note where it is."""
        access, location = self._access, _location(sampler)
        snapshot = sampler.snapshot or sampler.sampler_id
        ended = self._saving[sampler.sampler_id] = anyio.Event()
        try:
            save = access.engine.save_snapshot(snapshot, location)
            saved = await access.guard(access.epoch(), save)
            # A concurrent drop() waits for this save to end, and then deletes the file.
            if sampler.sampler_id in self._live:
                kept = replace(sampler, location=location, size_bytes=saved.size_bytes)
                await self._store.put_sampler(kept)
                self.add(kept)
        finally:
            del self._saving[sampler.sampler_id]
            ended.set()

    @contextmanager
    def using(self, sampler_id: str) -> Generator[None]:
        """Keep a sampler while a sample needs it."""
        known = self._live.get(sampler_id)
        if known is None:
            yield
            return
        known.in_use += 1
        try:
            yield
        finally:
            known.in_use -= 1
            known.used_at = self._clock.now()

    def size_bytes(self, owner: str) -> int:
        """What a tenant's published samplers take up in files."""
        return sum(each.sampler.size_bytes for each in self._of(owner))

    def expected_bytes(self, model_id: str) -> int:
        """The expected size of a model's next sampler: that of its last one, or 0."""
        sizes = [
            each.sampler.size_bytes
            for each in self._live.values()
            if each.sampler.model_id == model_id and each.sampler.size_bytes
        ]
        return sizes[-1] if sizes else 0

    async def free(self, owner: str, size_bytes: int) -> None:
        """Drop a tenant's least recently used samplers until that much is free, or none is left."""
        newest = {each.sampler.model_id: each for each in self._live.values()}
        idle = [
            each
            for each in self._of(owner)
            if each.sampler.location is not None
            and not each.in_use
            and newest[each.sampler.model_id] is not each
        ]
        dropped: list[StoredSampler] = []
        for each in sorted(idle, key=lambda each: each.used_at):
            if size_bytes <= 0:
                break
            size_bytes -= each.sampler.size_bytes
            dropped.append(each.sampler)
        for sampler in dropped:
            await self._store.put_sampler(replace(sampler, dropped=_NO_ROOM))
        await self.drop(dropped, _NO_ROOM)

    async def drop(self, samplers: Sequence[StoredSampler], why: str) -> None:
        """Take samplers out of the engine and delete their files; one commit for all of them.

        A crash in the middle leaves records of a session that is over, or with a reason why they
        are dropped: the next start drops them again.
        """
        for sampler in samplers:
            known = self._live.pop(sampler.sampler_id, None)
            if known is not None and known.epoch == self._access.epoch():
                snapshot = sampler.snapshot or sampler.sampler_id
                await quietly(self._access.engine.drop_snapshot(snapshot))
            if sampler.snapshot is not None:
                await self._delete_file(sampler)
        gone = [s.sampler_id for s in samplers if s.sampler_id not in self._undeleted]
        await self._store.close_samplers(gone, why)

    def keys(self) -> set[str]:
        """The keys of the samplers that it knows."""
        known = (each.sampler for each in self._live.values())
        return {claim_key(sampler) for sampler in (*known, *self._undeleted.values())}

    async def hand_over(self, key: str) -> None:
        """Forget the samplers of a key that another node takes over; their files stay."""
        for sampler_id, each in list(self._live.items()):
            if claim_key(each.sampler) == key:
                del self._live[sampler_id]
                if each.epoch == self._access.epoch():
                    snapshot = each.sampler.snapshot or sampler_id
                    await quietly(self._access.engine.drop_snapshot(snapshot))

    async def _delete_file(self, sampler: StoredSampler) -> None:
        saving = self._saving.get(sampler.sampler_id)
        if saving is not None:
            await saving.wait()
        self._undeleted[sampler.sampler_id] = sampler
        if await quietly(self._access.engine.delete_saved(_location(sampler))):
            self._undeleted.pop(sampler.sampler_id, None)

    async def retry(self) -> None:
        """Delete files again that could not be deleted."""
        await self.drop(list(self._undeleted.values()), SESSION_OVER)

    def _of(self, owner: str) -> Iterable[_Published]:
        return [each for each in self._live.values() if each.sampler.owner == owner]


class UnsavedSamplers:
    """The acknowledged samplers of one model that are in no file yet, and what writes them.

    Until they are in files, a crash publishes them again from the model's journal, so no snapshot
    of the model may replace that journal.
    """

    def __init__(
        self,
        samplers: PublishedSamplers,
        access: EngineAccess,
        clock: Clock,
        start: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._samplers = samplers
        self._access = access
        self._clock = clock
        self._start = start
        # Mutable state: the samplers, whether they are being written, and an event for changes.
        self._unsaved: dict[str, StoredSampler] = {}
        self._writing = False
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._unsaved)

    def __iter__(self) -> Iterator[StoredSampler]:
        return iter(list(self._unsaved.values()))

    def add(self, sampler: StoredSampler) -> None:
        """A sampler that a crash would publish again."""
        self._unsaved[sampler.sampler_id] = sampler

    def forget(self, samplers: Iterable[StoredSampler]) -> None:
        """Samplers that are saved, or gone."""
        for sampler in samplers:
            self._unsaved.pop(sampler.sampler_id, None)
            self._access.clear([_keeping(sampler)])
        self._notify()

    async def saved(self) -> None:
        """Return when there are none; raises if they must be published again first."""
        while self._unsaved:
            if self._next() is None:
                raise EngineRestartedError("the engine was started again")
            changed = self._changed
            self.write()
            await changed.wait()

    def write(self) -> None:
        """Write them to their files, one after another, beside what runs."""
        if self._unsaved and not self._writing:
            self._writing = True
            self._start(self._write_all)

    async def _write_all(self) -> None:
        failures = 0
        try:
            while (sampler := self._next()) is not None:
                try:
                    with no_stray_cancellation():
                        await self._write(sampler)
                    failures = 0
                except EngineRestartedError:
                    continue
                except Exception as error:  # noqa: BLE001 - one try ends here; another follows
                    failures += 1
                    _log.error("weights of %s cannot be kept yet: %s", sampler.sampler_id, error)
                    await self._clock.sleep(retry_wait_s(failures))
        finally:
            self._writing = False
            self._notify()

    async def _write(self, sampler: StoredSampler) -> None:
        access, name = self._access, _keeping(sampler)
        try:
            async with access.running([name]):
                await self._samplers.save(sampler)
        except EngineDiedError:
            # One that was forgotten meanwhile is not tried again, so it is no suspect.
            if sampler.sampler_id not in self._unsaved or not access.blame(name):
                return
            why = "the engine died each time they were written to disk"
            await self._samplers.drop([sampler], why)
        self.forget([sampler])

    def _next(self) -> StoredSampler | None:
        """The oldest one that can be written; the others come when the model is restored."""
        unsaved = self._unsaved.values()
        return next((s for s in unsaved if self._samplers.in_engine(s.sampler_id)), None)

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _keeping(sampler: StoredSampler) -> str:
    """The name under which deaths of the engine are counted while a sampler is written."""
    return f"keeping {sampler.sampler_id}"


def _location(sampler: StoredSampler) -> str:
    return f"sampler/{sampler.sampler_id}"
