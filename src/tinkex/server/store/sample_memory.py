"""Samples in memory: every store keeps them like this, because a restart may lose them.

Samples are many and short. Their clients send a lost one again, so writing them down would
cost more than it saves. Of the finished ones only the newest are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.server.store.records import changed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tinkex.server.store.records import Operation, OperationOutcome

MOST_FINISHED = 20_000
"""Finished samples that are remembered; one that goes is answered like one that was lost."""


@dataclass(slots=True)
class _Ended:
    """What ended at one sampling client, in that order; `gone` is the cursor of the first."""

    gone: int
    op_ids: list[str] = field(default_factory=list[str])


class SampleMemory:
    """Operations in a dictionary. Used from one event loop, so it needs no locks."""

    def __init__(self, most_finished: int = MOST_FINISHED) -> None:
        self._most_finished = most_finished
        # Mutable state: unfinished samples in order of arrival, finished ones in order of their
        # end, the size of their results, and the ended ones per sampling client.
        self._unfinished: dict[str, Operation] = {}
        self._finished: dict[str, Operation] = {}
        self._ended: dict[tuple[str, int], _Ended] = {}
        # The highest cursor of a client that was forgotten. Cursors of new ones start here, so
        # that a client that asks again misses nothing.
        self._first_cursor = 0
        self.result_bytes = 0

    def submit(self, operation: Operation) -> tuple[Operation, bool]:
        """Accept a sample, or find the one that was accepted under its id."""
        known = self.get(operation.op_id)
        if known is not None:
            return known, False
        self._unfinished[operation.op_id] = operation
        return operation, True

    def get(self, op_id: str) -> Operation | None:
        """A sample by its id."""
        return self._unfinished.get(op_id) or self._finished.get(op_id)

    def finished_ids(self) -> Iterable[str]:
        """The ids of the samples that have ended."""
        return self._finished.keys()

    def of_session(self, session_id: str) -> list[Operation]:
        """The samples of a session: the finished ones, then the others in order of arrival."""
        both = (*self._finished.values(), *self._unfinished.values())
        return [op for op in both if op.session_id == session_id]

    def pending(self) -> list[Operation]:
        """The samples that have not ended, in order of arrival."""
        return list(self._unfinished.values())

    def start(self, op_id: str, at: float) -> None:
        """Note when a sample began to run."""
        known = self._unfinished.get(op_id)
        if known is not None and known.state == "queued":
            self._unfinished[op_id] = changed(known, state="running", started_at=at)

    def finish(self, op_id: str, outcome: OperationOutcome, at: float) -> bool:
        """Record how a sample ended; False when it had ended before."""
        known = self._unfinished.pop(op_id, None)
        if known is None:
            return False
        # The request is only needed to run it; dropping it keeps long runs small.
        self._finished[op_id] = changed(
            known, state="done", outcome=outcome, finished_at=at, request=None
        )
        self.result_bytes += len(outcome.body or b"")
        if known.sampler_id is not None:
            client = (known.sampler_id, known.clone)
            self._ended.setdefault(client, _Ended(self._first_cursor)).op_ids.append(op_id)
        if len(self._finished) > self._most_finished:
            self._forget(next(iter(self._finished)))
        return True

    def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        """Samples of one client that ended after a cursor, and the new cursor."""
        ended = self._ended.get((sampler_id, clone))
        if ended is None:
            return [], after
        new = ended.op_ids[max(after - ended.gone, 0) :]
        found = [self._finished[op_id] for op_id in new if op_id in self._finished]
        return found, max(after, ended.gone + len(ended.op_ids))

    def drop_results(self, op_ids: Iterable[str]) -> None:
        """Forget payloads, not samples."""
        for op_id in op_ids:
            known = self._finished.get(op_id)
            if known is not None and known.outcome is not None and known.outcome.body is not None:
                self.result_bytes -= len(known.outcome.body)
                outcome = changed(known.outcome, body=None)
                self._finished[op_id] = changed(known, outcome=outcome)

    def drop_results_before(self, at: float) -> int:
        """Forget the payloads of everything that finished before a time."""
        old = [
            o.op_id
            for o in self._before(at)
            if o.outcome is not None and o.outcome.body is not None
        ]
        self.drop_results(old)
        return len(old)

    def forget_before(self, at: float) -> int:
        """Forget what finished before a time."""
        old = self._before(at)
        for operation in old:
            self._forget(operation.op_id)
        return len(old)

    def clear(self) -> list[str]:
        """Forget every sample, as a restart does; returns their ids, to wake their waiters."""
        lost = [*self._finished, *self._unfinished]
        self._finished.clear()
        self._unfinished.clear()
        for client in list(self._ended):
            self._shorten(client)
        self.result_bytes = 0
        return lost

    def forget_samplers(self, sampler_ids: Collection[str]) -> list[str]:
        """Forget every sample of these; returns their ids, to wake their waiters."""
        both = (*self._finished.values(), *self._unfinished.values())
        lost = [op.op_id for op in both if op.sampler_id in sampler_ids]
        for op_id in lost:
            if self._unfinished.pop(op_id, None) is None:
                self._forget(op_id)
        return lost

    def _before(self, at: float) -> list[Operation]:
        ended = self._finished.values()
        return [o for o in ended if o.finished_at is not None and o.finished_at < at]

    def _forget(self, op_id: str) -> None:
        self.drop_results([op_id])
        known = self._finished.pop(op_id)
        if known.sampler_id is not None:
            self._shorten((known.sampler_id, known.clone))

    def _shorten(self, client: tuple[str, int]) -> None:
        """Forget the oldest of what ended at a client, and the client after the last of it."""
        ended = self._ended[client]
        gone = 0
        while gone < len(ended.op_ids) and ended.op_ids[gone] not in self._finished:
            gone += 1
        del ended.op_ids[:gone]
        ended.gone += gone
        if not ended.op_ids:
            self._first_cursor = max(self._first_cursor, ended.gone)
            del self._ended[client]
