"""A store that forgets when the process ends: for tests and throwaway servers."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tinkex.clock import SystemClock
from tinkex.server.store.memory_ownership import MemoryOwnership, SharedNodes
from tinkex.server.store.ownership import claim_key
from tinkex.server.store.records import (
    HOUR_S,
    AuditEntry,
    HourOfUsage,
    KeptPart,
    LimitReached,
    changed,
    row_bytes,
)
from tinkex.server.store.sample_memory import SampleMemory
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.server.store.records import (
        ApiKey,
        CheckpointKind,
        Model,
        Operation,
        OperationOutcome,
        Part,
        Refusal,
        StoredCheckpoint,
        StoredLoss,
        StoredSampler,
        StoredSession,
        UsageEntry,
    )
    from tinkex.types import SessionStatus


class _Answer(NamedTuple):
    """What is remembered for an idempotency key, since when, and for which session."""

    answer: str
    at: float
    session_id: str | None


class MemoryStore(MemoryOwnership):
    """A `Store` in dictionaries. Used from one event loop, so it needs no locks."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock or SystemClock(), SampleMemory(), SharedNodes())
        # Mutable state: one dictionary per kind of record, in order of arrival.
        self._sessions: dict[str, StoredSession] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, StoredSampler] = {}
        self._copies: dict[str, int] = defaultdict(int)
        self._checkpoints: dict[str, StoredCheckpoint] = {}
        self._losses: dict[str, StoredLoss] = {}
        self._operations: dict[str, Operation] = {}
        # Bodies of finished operations, until they are trimmed.
        self._bodies: dict[str, bytes] = {}
        self._keys: dict[int, ApiKey] = {}
        self._answers: dict[tuple[str, str], _Answer] = {}
        self._audit: list[AuditEntry] = []
        self._refusals: Counter[tuple[int, Refusal]] = Counter()
        self._usage: list[UsageEntry] = []

    def beside(self, clock: Clock | None = None) -> MemoryStore:
        """Another store on the same records, as another node has; samples are not shared."""
        other = MemoryStore(clock or self._clock)
        own = {"_clock", "_samples", "_node_id", "_adopted", "_hints"}
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        self._shared.stores.append(other)
        return other

    async def put_session(self, session: StoredSession) -> None:
        self._fence()
        self._sessions[session.session_id] = session
        self._hint(f"session {session.session_id}")

    async def change_session(self, session_id: str, **fields: Any) -> None:
        known = self._sessions.get(session_id)
        if known is not None:
            await self.put_session(replace(known, **fields))

    async def end_session(self, session: StoredSession, status: SessionStatus) -> bool:
        known = self._sessions.get(session.session_id)
        if known is None or not known.active:
            return False
        await self.put_session(replace(known, status=status))
        return True

    async def add_session(
        self, session: StoredSession, *, max_sessions: int | None, max_kept_sessions: int
    ) -> LimitReached | None:
        self._fence()
        ours = [s for s in self._sessions.values() if s.owner == session.owner]
        active = sum(s.active and s.heartbeats for s in ours)
        if max_sessions is not None and active >= max_sessions:
            return LimitReached("max_sessions", active)
        if len(ours) >= max_kept_sessions:
            return LimitReached("max_kept_sessions", len(ours))
        self._sessions[session.session_id] = session
        return None

    async def get_session(self, session_id: str) -> StoredSession | None:
        return self._sessions.get(session_id)

    async def sessions(
        self,
        owner: str | None = None,
        *,
        active: bool = False,
        before: float | None = None,
        limit: int | None = None,
        project_id: str | None = None,
    ) -> Sequence[StoredSession]:
        found = [
            s
            for s in self._sessions.values()
            if owner in (None, s.owner)
            and (s.active or not active)
            and (before is None or s.created_at <= before)
            and project_id in (None, s.project_id)
        ]
        found.sort(key=lambda s: (s.created_at, s.session_id), reverse=True)
        return found[:limit]

    async def session_ids(
        self, owner: str, offset: int, limit: int, *, project_id: str | None = None
    ) -> Sequence[str]:
        found = await self.sessions(owner, project_id=project_id)
        return [s.session_id for s in found[offset : offset + limit]]

    async def ids_of_session(self, session_id: str) -> tuple[Sequence[str], Sequence[str]]:
        models = [m.model_id for m in self._models.values() if m.session_id == session_id]
        samplers = [s.sampler_id for s in await self.samplers(session_id)]
        return models, samplers

    async def count_sessions(
        self, owner: str | None = None, *, active: bool = False, heartbeats: bool = False
    ) -> int:
        found = await self.sessions(owner, active=active)
        return sum(s.heartbeats or not heartbeats for s in found)

    async def silent_sessions(self, before: float) -> Sequence[StoredSession]:
        attended = [s for s in self._sessions.values() if s.active and s.heartbeats]
        return [s for s in attended if s.last_seen_at < before]

    async def unattended_sessions(self, before: float, limit: int) -> Sequence[StoredSession]:
        opened = {m.session_id for m in self._models.values() if not m.closed}
        found = (s for s in self._sessions.values() if s.active and not s.heartbeats)
        old = (s for s in found if s.last_seen_at < before and s.session_id not in opened)
        return list(islice(old, limit))

    async def touch_session(self, session_id: str, at: float) -> StoredSession | None:
        known = self._sessions.get(session_id)
        if known is not None and known.active:
            known = self._sessions[session_id] = replace(known, last_seen_at=at)
        return known

    async def touch_sessions(self, at: float) -> None:
        for session in list(self._sessions.values()):
            if session.heartbeats:
                await self.touch_session(session.session_id, at)

    async def add_model(
        self,
        model: Model,
        *,
        max_models: int | None = None,
        max_runs: int | None = None,
        silent_since: float = 0.0,
    ) -> Model | LimitReached:
        self._fence()
        if model.model_id not in self._models:
            ours = [m for m in self._models.values() if m.owner == model.owner]
            alive = sum(self._is_alive(m, silent_since) for m in ours)
            if max_models is not None and alive >= max_models:
                return LimitReached("max_models", alive)
            if max_runs is not None and len(ours) >= max_runs:
                return LimitReached("max_runs", len(ours))
        return self._models.setdefault(model.model_id, model)

    def _is_alive(self, model: Model, silent_since: float) -> bool:
        session = self._sessions.get(model.session_id)
        if model.closed or session is None or not session.active:
            return False
        return session.heartbeats or model.last_request_at > silent_since

    async def put_model(self, model: Model) -> None:
        self._fence()
        self._models[model.model_id] = model

    async def change_model(self, model_id: str, **fields: Any) -> None:
        owned = {"snapshot_location", "snapshot_seq", "corrupted"} & fields.keys()
        self._check_key(model_id if owned else None)
        known = self._models.get(model_id)
        if known is not None:
            self._models[model_id] = replace(known, **fields)

    async def move_model(self, model: Model, session_id: str) -> bool:
        self._fence()
        known = self._models.get(model.model_id)
        old = self._sessions.get(model.session_id)
        if known is None or known.session_id != model.session_id:
            return False
        if old is None or not old.active:
            return False
        self._models[model.model_id] = replace(known, session_id=session_id)
        return True

    async def get_model(self, model_id: str) -> Model | None:
        return self._models.get(model_id)

    async def models(
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        project_id: str | None = None,
        published_at: float | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[Model]:
        published: set[str] = set()
        if published_at is not None:
            public = await self.checkpoints(public=True, live_at=published_at)
            published = {c.model_id for c in public}
        found = [
            m
            for m in reversed(self._models.values())
            if (owner in (None, m.owner) or m.model_id in published)
            and session_id in (None, m.session_id)
            and project_id in (None, m.project_id)
        ]
        return found[offset:][:limit]

    async def count_models(
        self, owner: str, *, project_id: str | None = None, published_at: float | None = None
    ) -> int:
        found = await self.models(owner=owner, project_id=project_id, published_at=published_at)
        return len(found)

    async def open_models(self, owner: str | None = None) -> Sequence[Model]:
        found = [m for m in self._models.values() if owner in (None, m.owner) and not m.closed]
        return sorted(found, key=lambda m: m.created_at)

    async def add_sampler(
        self, sampler: StoredSampler, *, max_samplers: int | None = None
    ) -> StoredSampler | LimitReached:
        self._fence()
        have = sum(s.session_id == sampler.session_id for s in self._samplers.values())
        new = sampler.sampler_id not in self._samplers
        if new and max_samplers is not None and have >= max_samplers:
            return LimitReached("max_samplers", have)
        return self._samplers.setdefault(sampler.sampler_id, sampler)

    async def put_sampler(self, sampler: StoredSampler) -> None:
        self._check_sampler(sampler)
        self._samplers[sampler.sampler_id] = sampler

    async def get_sampler(self, sampler_id: str) -> StoredSampler | None:
        return self._samplers.get(sampler_id)

    async def samplers(
        self,
        session_id: str | None = None,
        *,
        model_id: str | None = None,
        location: str | None = None,
        unsaved: bool = False,
        located: bool = False,
    ) -> Sequence[StoredSampler]:
        return [
            s
            for s in self._samplers.values()
            if session_id in (None, s.session_id)
            and model_id in (None, s.model_id)
            and location in (None, s.location)
            and (not unsaved or (s.snapshot and s.location is None and s.dropped is None))
            and (not located or s.location is not None)
        ]

    async def close_samplers(
        self, sampler_ids: Iterable[str], why: str = "its session is over"
    ) -> None:
        found = [self._samplers[name] for name in sampler_ids if name in self._samplers]
        for known in found:
            self._check_sampler(known)
        for known in found:
            self._samplers[known.sampler_id] = replace(
                known, location=None, size_bytes=0, dropped=known.dropped or why
            )

    def _published(self, model_id: str) -> Sequence[str]:
        return [s.sampler_id for s in self._samplers.values() if s.model_id == model_id]

    async def join_sampler(self, sampler_id: str) -> int:
        self._copies[sampler_id] += 1
        return self._copies[sampler_id]

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        self._fence()
        self._checkpoints[checkpoint.path] = checkpoint

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None:
        return self._checkpoints.get(path)

    async def change_checkpoint(self, checkpoint: StoredCheckpoint, **fields: Any) -> bool:
        self._fence()
        known = self._checkpoints.get(checkpoint.path)
        if known is None or known.location != checkpoint.location:
            return False
        self._checkpoints[checkpoint.path] = replace(known, **fields)
        return True

    async def delete_checkpoint(self, checkpoint: StoredCheckpoint) -> bool:
        self._fence()
        known = self._checkpoints.get(checkpoint.path)
        if known is None or known.location != checkpoint.location:
            return False
        del self._checkpoints[checkpoint.path]
        return True

    async def checkpoints(
        self,
        *,
        owner: str | None = None,
        model_id: str | None = None,
        kinds: Collection[CheckpointKind] | None = None,
        public: bool = False,
        live_at: float | None = None,
        expired_at: float | None = None,
        project_id: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> Sequence[StoredCheckpoint]:
        found = [
            c
            for c in self._checkpoints.values()
            if owner in (None, c.owner)
            and model_id in (None, c.model_id)
            and project_id in (None, c.project_id)
            and (kinds is None or c.kind in kinds)
            and (c.public or not public)
            and (live_at is None or c.expires_at is None or c.expires_at > live_at)
            and (expired_at is None or (c.expires_at is not None and c.expires_at <= expired_at))
        ]
        # Saved at one moment, the one that was stored later comes first.
        found.reverse()
        return sorted(found, key=lambda c: -c.created_at)[offset:][:limit]

    async def newest_checkpoints(
        self,
        model_ids: Collection[str],
        *,
        kinds: Collection[CheckpointKind],
        live_at: float,
        public: bool = False,
    ) -> Sequence[StoredCheckpoint]:
        found: dict[tuple[str, str], StoredCheckpoint] = {}
        for each in await self.checkpoints(kinds=kinds, live_at=live_at, public=public):
            if each.model_id in model_ids:
                found.setdefault((each.model_id, each.kind), each)
        return list(found.values())

    async def count_checkpoints(
        self,
        owner: str,
        *,
        live_at: float,
        kinds: Collection[CheckpointKind] | None = None,
        project_id: str | None = None,
    ) -> int:
        found = await self.checkpoints(
            owner=owner, live_at=live_at, kinds=kinds, project_id=project_id
        )
        return len(found)

    async def kept(self, owner: str) -> Mapping[Part, KeptPart]:
        saved = await self.checkpoints(owner=owner)
        ours = [o for o in self._operations.values() if o.owner == owner]
        bodies = [o.body or self._bodies.get(o.op_id, b"") for o in ours]
        outcomes = [o.outcome for o in ours if o.outcome is not None]
        sizes: dict[Part, list[int]] = {
            "checkpoints": [c.size_bytes + row_bytes(c) for c in saved],
            "samplers": [s.size_bytes for s in self._samplers.values() if s.owner == owner],
            "losses": [x.size_bytes for x in self._losses.values() if x.owner == owner],
            "requests": [len(body) for body in bodies],
            "results": [len(outcome.body or b"") for outcome in outcomes],
            "sessions": [row_bytes(s) for s in self._sessions.values() if s.owner == owner],
            "runs": [row_bytes(m) for m in self._models.values() if m.owner == owner],
        }
        for part in ("samplers", "requests", "results"):
            sizes[part] = [size for size in sizes[part] if size]
        return {part: KeptPart(len(found), sum(found)) for part, found in sizes.items()}

    async def stored_by_project(
        self, owner: str, *, live_at: float, project_id: str | None = None
    ) -> Mapping[str | None, KeptPart]:
        found: dict[str | None, KeptPart] = {}
        for each in await self.checkpoints(owner=owner, live_at=live_at, project_id=project_id):
            known = found.get(each.project_id, KeptPart())
            total = KeptPart(known.count + 1, known.size_bytes + each.size_bytes)
            found[each.project_id] = total
        return found

    async def saved_by_session(self, session_id: str) -> tuple[int, int]:
        ours = {m.model_id for m in await self.models(session_id=session_id)}
        sizes = [c.size_bytes for c in self._checkpoints.values() if c.model_id in ours]
        return len(sizes), sum(sizes)

    async def add_loss(
        self, loss: StoredLoss, *, max_losses: int | None = None
    ) -> StoredLoss | LimitReached:
        have = sum(x.session_id == loss.session_id for x in self._losses.values())
        if loss.loss_id not in self._losses and max_losses is not None and have >= max_losses:
            return LimitReached("max_losses", have)
        return self._losses.setdefault(loss.loss_id, loss)

    async def get_loss(self, loss_id: str) -> StoredLoss | None:
        return self._losses.get(loss_id)

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        if operation.kind == "sample":
            return self._samples.submit(operation)
        known = self._operations.get(operation.op_id)
        if known is not None:
            return known, False
        self._check_key(operation.model_id)
        self._operations[operation.op_id] = operation
        model = self._models.get(operation.model_id or "")
        if model is not None:
            self._models[model.model_id] = replace(model, last_request_at=operation.created_at)
        return operation, True

    async def get_operation(self, op_id: str) -> Operation | None:
        return self._samples.get(op_id) or self._operations.get(op_id)

    async def pending(self, key: str | None = None) -> Sequence[Operation]:
        training = [o for o in self._operations.values() if o.state != "done"]
        if self._node_id is not None:
            training = [o for o in training if o.model_id is None or o.model_id in self._adopted]
        found = [*training, *self._samples.pending()]
        return found if key is None else [op for op in found if self._key_of(op) == key]

    def _key_of(self, operation: Operation) -> str | None:
        sampler = self._samplers.get(operation.sampler_id or "")
        if operation.model_id is None and sampler is not None:
            return claim_key(sampler)
        return operation.model_id or operation.sampler_id

    async def operations(self, session_id: str) -> Sequence[Operation]:
        training = [
            _without_payloads(o) for o in self._operations.values() if o.session_id == session_id
        ]
        return [*training, *self._samples.of_session(session_id)]

    async def start(self, op_ids: Iterable[str], at: float) -> None:
        for op_id in op_ids:
            self._samples.start(op_id, at)
            known = self._operations.get(op_id)
            if known is not None and known.state == "queued":
                self._operations[op_id] = changed(known, state="running", started_at=at)

    async def finish(
        self, op_id: str, outcome: OperationOutcome, at: float, usage: UsageEntry | None = None
    ) -> bool:
        if not (self._samples.finish(op_id, outcome, at) or self._finish(op_id, outcome, at)):
            return False
        if usage is not None:
            self._usage.append(usage)
        return True

    def _finish(self, op_id: str, outcome: OperationOutcome, at: float) -> bool:
        known = self._operations.get(op_id)
        if known is None or known.state == "done":
            return False
        self._check_key(known.model_id)
        self._operations[op_id] = changed(
            known, state="done", outcome=outcome, finished_at=at, request=None, body=b""
        )
        if known.model_id is not None and known.body:
            self._bodies[op_id] = known.body
        return True

    async def journal(self, model_id: str, after: int) -> Sequence[Operation]:
        found = [
            o
            if o.state != "done"
            else changed(_without_payloads(o), body=self._bodies.get(o.op_id, b""))
            for o in self._operations.values()
            if o.model_id == model_id and o.seq_id > after
        ]
        return sorted(found, key=lambda o: o.seq_id)

    async def trim_journal(self, model_id: str, through: int) -> None:
        self._check_key(model_id)
        for op in self._operations.values():
            if op.model_id == model_id and op.seq_id <= through and op.state == "done":
                self._bodies.pop(op.op_id, None)

    async def last_turn(self, model_id: str) -> int:
        ours = (o for o in self._operations.values() if o.model_id == model_id)
        return max((o.seq_id for o in ours if o.state == "done"), default=-1)

    async def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        return self._samples.completions(sampler_id, clone, after)

    async def drop_results(self, op_ids: Iterable[str]) -> None:
        op_ids = list(op_ids)
        self._samples.drop_results(op_ids)
        for op_id in op_ids:
            self._drop_result(op_id)

    def _drop_result(self, op_id: str) -> bool:
        known = self._operations.get(op_id)
        if known is None or known.outcome is None or known.outcome.body is None:
            return False
        self._operations[op_id] = changed(known, outcome=changed(known.outcome, body=None))
        return True

    async def drop_results_before(self, at: float) -> int:
        old = [
            o.op_id
            for o in self._operations.values()
            if o.finished_at is not None and o.finished_at < at
        ]
        return self._samples.drop_results_before(at) + sum(map(self._drop_result, old))

    async def forget_operations_before(self, at: float) -> int:
        last = {m.model_id: await self.last_turn(m.model_id) for m in await self.open_models()}
        old = [
            o.op_id
            for o in self._operations.values()
            if o.finished_at is not None
            and o.finished_at < at
            and o.op_id not in self._bodies
            and o.seq_id != last.get(o.model_id or "")
        ]
        for op_id in old:
            del self._operations[op_id]
        return len(old) + self._samples.forget_before(at)

    async def prune(self, before: float, limit: int) -> int:
        old = list(islice(self._prunable(before), limit))
        for records, key in old:
            del records[key]
            self._bodies.pop(cast("str", key), None)
            self._copies.pop(cast("str", key), None)
        return len(old)

    def _prunable(self, before: float) -> Iterator[tuple[dict[Any, Any], object]]:
        """The dictionaries and keys of what ended before a time, each session after its own."""
        for key, answer in self._answers.items():
            if answer.session_id is None and answer.at < before:
                yield self._answers, key
        needed = {m.session_id for m in self._models.values() if not m.closed}
        needed.update(s.session_id for s in self._samplers.values() if s.location is not None)
        for op in self._operations.values():
            if op.finished_at is None or op.finished_at >= before:
                needed.add(op.session_id)
        over = {
            s.session_id
            for s in self._sessions.values()
            if not (s.active and s.heartbeats) and s.last_seen_at < before
        } - needed
        for records in (self._operations, self._samplers, self._losses, self._answers):
            held: dict[Any, Any] = records
            yield from ((held, key) for key, one in held.items() if one.session_id in over)
        yield from ((self._sessions, key) for key in self._sessions if key in over)

    async def probe(self, size_bytes: int) -> None:
        """Nothing to try: memory takes it."""

    async def recall(self, owner: str, key: str) -> str | None:
        known = self._answers.get((owner, key))
        return None if known is None else known.answer

    async def remember(
        self, owner: str, key: str, answer: str, *, session_id: str | None = None
    ) -> str:
        given = _Answer(answer, self._clock.wall(), session_id)
        return self._answers.setdefault((owner, key), given).answer

    async def add_key(self, key: ApiKey) -> ApiKey:
        kept = replace(key, key_id=len(self._keys) + 1)
        self._keys[kept.key_id] = kept
        return kept

    async def find_key(self, key_hash: str) -> ApiKey | None:
        return next((k for k in self._keys.values() if k.key_hash == key_hash), None)

    async def get_key(self, key_id: int) -> ApiKey | None:
        return self._keys.get(key_id)

    async def any_key(self, at: float) -> bool:
        unrevoked = (k for k in self._keys.values() if k.revoked_at is None)
        return any(k.expires_at is None or k.expires_at > at for k in unrevoked)

    def use_key(self, key_id: int, at: float) -> None:
        self._keys[key_id] = replace(self._keys[key_id], last_used_at=at)

    async def keys(self, owner: str | None = None) -> Sequence[ApiKey]:
        return [k for k in self._keys.values() if owner in (None, k.owner)]

    async def revoke_key(self, key_id: int, at: float) -> bool:
        known = self._keys.get(key_id)
        if known is None or known.revoked_at is not None:
            return False
        self._keys[key_id] = replace(known, revoked_at=at)
        self._hint(f"key {key_id}")
        return True

    async def audit(self, entry: AuditEntry) -> None:
        self._audit.append(entry)

    def refused(self, refusal: Refusal, at: float) -> None:
        self._refusals[int(at // 60), refusal] += 1

    async def forget_audit_before(self, at: float, limit: int) -> int:
        old = [entry for entry in self._audit if entry.at < at][:limit]
        self._audit[:] = [entry for entry in self._audit if entry not in old]
        return len(old)

    def _refused_lines(self) -> list[AuditEntry]:
        return [
            AuditEntry(
                at=minute * 60.0,
                owner=refusal.owner,
                topic="refused",
                event=refusal.event,
                details={"count": count, "within_s": 60.0},
                key_id=refusal.key_id,
                address=refusal.address,
            )
            for (minute, refusal), count in self._refusals.items()
        ]

    async def audit_log(
        self,
        owner: str | None,
        *,
        topic: str | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int | None = None,
    ) -> Sequence[AuditEntry]:
        found = [
            e
            for e in sorted([*self._audit, *self._refused_lines()], key=lambda e: e.at)
            if owner in (None, e.owner)
            and topic in (None, e.topic)
            and (start is None or e.at >= start)
            and (end is None or e.at < end)
        ]
        return found if limit is None else found[max(len(found) - limit, 0) :]

    async def add_usage(self, entry: UsageEntry) -> None:
        self._usage.append(entry)

    async def usage(self, owner: str, start: float, end: float) -> Sequence[HourOfUsage]:
        groups: defaultdict[tuple[Any, ...], list[Usage]] = defaultdict(list)
        for e in self._usage:
            if e.owner == owner and start <= e.at < end:
                hour = int(e.at // HOUR_S) * HOUR_S
                groups[hour, e.session_id, e.kind, e.base_model, e.project_id].append(e.usage)
        found = [
            HourOfUsage(
                hour=hour,
                session_id=session_id,
                base_model=base_model,
                project_id=project_id,
                kind=kind,
                count=len(each),
                usage=sum(each, Usage()),
            )
            for (hour, session_id, kind, base_model, project_id), each in groups.items()
        ]
        return sorted(found, key=lambda h: (h.hour, h.session_id, h.kind))

    def lose_samples(self) -> list[str]:
        """Forget every sample, as a restart does; returns their ids, to wake their waiters."""
        return self._samples.clear()

    def lose_memory(self) -> None:
        """Forget what no store keeps, as a restart does: samples and decoded requests."""
        self._samples.clear()
        for op in list(self._operations.values()):
            if op.request is not None:
                self._operations[op.op_id] = changed(op, request=None)


def _without_payloads(op: Operation) -> Operation:
    outcome = None if op.outcome is None else changed(op.outcome, body=None)
    return changed(op, body=b"", outcome=outcome)
