"""A store that forgets when the process ends: for tests and throwaway servers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinkex.server.store.records import (
        AuditEntry,
        Model,
        Operation,
        Outcome,
        Sampler,
        Session,
        StoredCheckpoint,
        StoredLoss,
        UsageEntry,
    )


class MemoryStore:
    """A `Store` in dictionaries. Used from one event loop, so it needs no locks."""

    def __init__(self) -> None:
        # Mutable state: one dictionary per kind of record, in order of arrival.
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._copies: dict[str, int] = defaultdict(int)
        self._checkpoints: dict[str, StoredCheckpoint] = {}
        self._losses: dict[str, StoredLoss] = {}
        self._operations: dict[str, Operation] = {}
        self._pending: dict[str, None] = {}
        self._by_session: dict[str, list[str]] = defaultdict(list)
        self._ended: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._answers: dict[tuple[str, str], str] = {}
        self._audit: list[AuditEntry] = []
        self._usage: list[UsageEntry] = []

    async def put_session(self, session: Session) -> None:
        self._sessions[session.session_id] = session

    async def get_session(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    async def sessions(self, owner: str | None = None) -> Sequence[Session]:
        found = [s for s in self._sessions.values() if owner in (None, s.owner)]
        return sorted(found, key=lambda s: (s.created_at, s.session_id), reverse=True)

    async def add_model(self, model: Model) -> Model:
        return self._models.setdefault(model.model_id, model)

    async def put_model(self, model: Model) -> None:
        self._models[model.model_id] = model

    async def get_model(self, model_id: str) -> Model | None:
        return self._models.get(model_id)

    async def models(
        self, *, owner: str | None = None, session_id: str | None = None
    ) -> Sequence[Model]:
        found = [
            m
            for m in self._models.values()
            if owner in (None, m.owner) and session_id in (None, m.session_id)
        ]
        return list(reversed(found))

    async def add_sampler(self, sampler: Sampler) -> Sampler:
        return self._samplers.setdefault(sampler.sampler_id, sampler)

    async def get_sampler(self, sampler_id: str) -> Sampler | None:
        return self._samplers.get(sampler_id)

    async def samplers(self, session_id: str | None = None) -> Sequence[Sampler]:
        return [s for s in self._samplers.values() if session_id in (None, s.session_id)]

    async def join_sampler(self, sampler_id: str) -> int:
        self._copies[sampler_id] += 1
        return self._copies[sampler_id]

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoints[checkpoint.path] = checkpoint

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None:
        return self._checkpoints.get(path)

    async def delete_checkpoint(self, path: str) -> bool:
        return self._checkpoints.pop(path, None) is not None

    async def checkpoints(
        self, *, owner: str | None = None, model_id: str | None = None
    ) -> Sequence[StoredCheckpoint]:
        found = [
            c
            for c in self._checkpoints.values()
            if owner in (None, c.owner) and model_id in (None, c.model_id)
        ]
        # Saved at one moment, the one that was stored later comes first.
        found.reverse()
        return sorted(found, key=lambda c: -c.created_at)

    async def add_loss(self, loss: StoredLoss) -> StoredLoss:
        return self._losses.setdefault(loss.loss_id, loss)

    async def get_loss(self, loss_id: str) -> StoredLoss | None:
        return self._losses.get(loss_id)

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        known = self._operations.get(operation.op_id)
        if known is not None:
            return known, False
        self._operations[operation.op_id] = operation
        self._pending[operation.op_id] = None
        self._by_session[operation.session_id].append(operation.op_id)
        return operation, True

    async def get_operation(self, op_id: str) -> Operation | None:
        return self._operations.get(op_id)

    async def pending(self) -> Sequence[Operation]:
        return [self._operations[op_id] for op_id in self._pending]

    async def operations(self, session_id: str) -> Sequence[Operation]:
        return [self._operations[op_id] for op_id in self._by_session.get(session_id, ())]

    async def start(self, op_ids: Iterable[str], at: float) -> None:
        for op_id in op_ids:
            known = self._operations.get(op_id)
            if known is not None and known.state == "queued":
                self._operations[op_id] = replace(known, state="running", started_at=at)

    async def finish(self, op_id: str, outcome: Outcome, at: float) -> bool:
        known = self._operations.get(op_id)
        if known is None or known.state == "done":
            return False
        # The request is only needed to run it; dropping it keeps long runs small.
        self._operations[op_id] = replace(
            known, state="done", outcome=outcome, finished_at=at, request=None
        )
        self._pending.pop(op_id, None)
        if known.sampler_id is not None:
            self._ended[known.sampler_id, known.clone].append(op_id)
        return True

    async def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        ended = self._ended.get((sampler_id, clone), [])
        found = [self._operations[i] for i in ended[max(after, 0) :] if i in self._operations]
        return found, max(after, len(ended))

    async def drop_results(self, op_ids: Iterable[str]) -> None:
        for op_id in op_ids:
            known = self._operations.get(op_id)
            if known is not None and known.outcome is not None and known.outcome.body is not None:
                outcome = replace(known.outcome, body=None)
                self._operations[op_id] = replace(known, outcome=outcome)

    async def drop_results_before(self, at: float) -> int:
        old = [
            o.op_id
            for o in self._operations.values()
            if o.finished_at is not None
            and o.finished_at < at
            and o.outcome is not None
            and o.outcome.body is not None
        ]
        await self.drop_results(old)
        return len(old)

    async def recall(self, owner: str, key: str) -> str | None:
        return self._answers.get((owner, key))

    async def remember(self, owner: str, key: str, answer: str) -> None:
        self._answers.setdefault((owner, key), answer)

    async def audit(self, entry: AuditEntry) -> None:
        self._audit.append(entry)

    async def audit_log(self, owner: str) -> Sequence[AuditEntry]:
        return [e for e in self._audit if e.owner == owner]

    async def add_usage(self, entry: UsageEntry) -> None:
        self._usage.append(entry)

    async def usage(self, owner: str, start: float, end: float) -> Sequence[UsageEntry]:
        return [e for e in self._usage if e.owner == owner and start <= e.at < end]

    def lose_samples(self) -> list[str]:
        """Forget every sample, as a restart does; their ids come back for waking waiters."""
        lost = [o.op_id for o in self._operations.values() if o.kind == "sample"]
        for op_id in lost:
            del self._operations[op_id]
            self._pending.pop(op_id, None)
        gone = set(lost)
        for ids in self._by_session.values():
            ids[:] = [i for i in ids if i not in gone]
        return lost
