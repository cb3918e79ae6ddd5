"""Operations and samples, and how they end.

Every unfinished operation is in memory, and memory decides what is new and what has ended: a
commit whose answer was lost is found in the database, but nobody was told of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tinkex.server.store.sql import operations
from tinkex.server.store.sql.operations import Ending
from tinkex.server.store.sql.overflow import ROOM_BYTES, clear
from tinkex.server.store.sql.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from tinkex.server.store.records import Operation, Outcome, UsageEntry


class Work(Shared):
    """The part of the store that knows operations."""

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        if operation.kind == "sample":
            return self._samples.submit(operation)
        known = await self._in_memory(operation.op_id)
        if known is not None:
            return known, False
        return await self._database.write(lambda c: operations.submit(c, operation), self._accepted)

    def _accepted(self, kept: Operation) -> tuple[Operation, bool]:
        first = self._open.get(kept.op_id)
        if first is not None or kept.state == "done":
            return first or kept, False
        self._open[kept.op_id] = kept
        model = self._model_cache.get(kept.model_id or "")
        if model is not None:
            changed = replace(model, last_request_at=kept.created_at)
            self._model_cache.put(model.model_id, changed)
        return kept, True

    async def get_operation(self, op_id: str) -> Operation | None:
        sample = self._samples.get(op_id)
        if sample is not None:
            return await self._overflow.restored(sample)
        known = await self._in_memory(op_id)
        if known is not None:
            return known
        return await self._database.read(lambda c: operations.get(c, op_id), self._found)

    def _found(self, operation: Operation | None) -> Operation | None:
        if operation is not None and operation.state == "done":
            self._finished.put(operation.op_id, operation)
        return operation and self._open.get(operation.op_id, operation)

    async def pending(self) -> Sequence[Operation]:
        await self._read_open()
        return [*self._open.values(), *self._samples.pending()]

    async def operations(self, session_id: str) -> Sequence[Operation]:
        found = await self._database.read(lambda c: operations.of_session(c, session_id))
        return [*map(self._newest, found), *self._samples.of_session(session_id)]

    async def start(self, op_ids: Iterable[str], at: float) -> None:
        await self._read_open()
        for op_id in op_ids:
            self._samples.start(op_id, at)
            known = self._open.get(op_id)
            if known is not None and known.state == "queued":
                self._open[op_id] = replace(known, state="running", started_at=at)

    async def finish(
        self, op_id: str, outcome: Outcome, at: float, usage: UsageEntry | None = None
    ) -> bool:
        sample = self._samples.get(op_id)
        if sample is not None:
            ended = sample.state == "done"
            return not ended and await self._finish_sample(op_id, outcome, at, usage)
        await self._read_open()
        known = self._open.get(op_id)
        if known is None:
            return False
        ending = Ending(op_id, outcome, known.started_at, at, usage)
        # A success that a power cut undoes is reached again by running the operation again; an
        # operation that failed or was withdrawn must not run after all.
        write = self._database.write if outcome.error else self._database.write_lightly
        return await write(ending.write, partial(self._ended, ending))

    async def _finish_sample(
        self, op_id: str, outcome: Outcome, at: float, usage: UsageEntry | None
    ) -> bool:
        size_bytes = len(outcome.body or b"")
        if size_bytes and self._samples.result_bytes + size_bytes > ROOM_BYTES:
            await self._read_open()
            outcome = await self._overflow.keep(op_id, outcome, at)
        first = self._samples.finish(op_id, outcome, at)
        if first and usage is not None:
            self._behind.use(usage)
        return first

    def _ended(self, ending: Ending, written: bool) -> bool:
        known = self._open.pop(ending.op_id, None)
        if known is None:
            return False
        if written:
            self._finished.put(ending.op_id, ending.applied_to(known))
        return True

    async def journal(self, model_id: str, after: int) -> Sequence[Operation]:
        found = await self._database.read(lambda c: operations.journal(c, model_id, after))
        return [self._newest(operation) for operation in found]

    async def trim_journal(self, model_id: str, through: int) -> None:
        await self._database.write(lambda c: operations.trim(c, model_id, through))

    async def last_turn(self, model_id: str) -> int:
        return await self._database.read(lambda c: operations.last_turn(c, model_id))

    async def last_turns(self) -> Mapping[str, int]:
        return await self._database.read(operations.last_turns)

    async def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        return self._samples.completions(sampler_id, clone, after)

    async def drop_results(self, op_ids: Iterable[str]) -> None:
        op_ids = list(op_ids)
        self._samples.drop_results(op_ids)
        await self._overflow.drop(op_ids)
        others = [op_id for op_id in op_ids if self._samples.get(op_id) is None]
        if others:
            await self._database.write(
                lambda c: operations.drop_results(c, others), lambda _: self._dropped(others)
            )

    async def drop_results_before(self, at: float) -> int:
        samples = self._samples.drop_results_before(at)
        old = partial(operations.drop_results_before, at=at)
        return samples + await self._in_parts(old, at)

    async def forget_operations_before(self, at: float) -> int:
        samples = self._samples.forget_before(at)
        self._overflow.forget(self._samples.finished_ids())
        old = partial(operations.forget_before, at=at)
        return samples + await self._in_parts(old, at)

    async def _in_parts(self, do: Callable[[Connection], int], at: float) -> int:
        """Forget in transactions of their own, so that others come in between."""
        total = count = await self._database.write(do, partial(self._dropped_before, at))
        while count:
            count = await self._database.write(do)
            total += count
        return total

    def _dropped(self, op_ids: Iterable[str]) -> None:
        for op_id in op_ids:
            self._finished.discard(op_id)

    def _dropped_before(self, at: float, count: int) -> int:
        self._dropped(
            op_id
            for op_id, operation in self._finished.items()
            if operation.finished_at is not None and operation.finished_at < at
        )
        return count

    async def _in_memory(self, op_id: str) -> Operation | None:
        await self._read_open()
        return self._open.get(op_id) or self._finished.get(op_id)

    def _newest(self, operation: Operation) -> Operation:
        return self._open.get(operation.op_id, operation)

    async def _read_open(self) -> None:
        """Read what earlier processes left unfinished, once."""
        if not self._open_read:
            await self._database.write(_read_unfinished, self._opened)

    def _opened(self, found: Sequence[Operation]) -> None:
        # Whoever asks twice at the start is answered twice; what is known by then is newer.
        self._open_read = True
        for operation in found:
            self._open.setdefault(operation.op_id, operation)


def _read_unfinished(connection: Connection) -> Sequence[Operation]:
    clear(connection)
    return operations.unfinished(connection)
