"""The protocol of stores: sessions, models, operations, checkpoints.

A store only keeps records. The handlers decide who may see one, and the scheduler when an operation
runs. A write is durable when its method returns, as far as the implementation is durable at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tinkex.server.store.ownership import Ownership

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tinkex.server.store.records import (
        ApiKey,
        AuditEntry,
        CheckpointKind,
        HourOfUsage,
        KeptPart,
        LimitReached,
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


class Store(Ownership, Protocol):
    """Memory for tests, a database for real."""

    # `put_*` stores or replaces. `add_*` keeps the first record of an id and returns it, so
    # that a repeated request finds what the first one made. `change_*` sets some fields of a record
    # that others change at the same time, and no change is lost.

    async def put_session(self, session: StoredSession) -> None: ...
    async def add_session(
        self, session: StoredSession, *, max_sessions: int | None, max_kept_sessions: int
    ) -> LimitReached | None:
        """Store a new session, unless its owner has too many that are active, or known at all.

        Counted and stored in one step: of requests at the same time as many succeed as fit.
        """
        ...

    async def change_session(self, session_id: str, **fields: Any) -> None:
        """Change some fields of a session; its end is not one of them."""
        ...

    async def end_session(self, session: StoredSession, status: SessionStatus) -> bool:
        """Let a session be over; False when it was: the first reason wins."""
        ...

    async def get_session(self, session_id: str) -> StoredSession | None: ...
    async def sessions(
        self,
        owner: str | None = None,
        *,
        active: bool = False,
        before: float | None = None,
        limit: int | None = None,
        project_id: str | None = None,
    ) -> Sequence[StoredSession]:
        """Newest first; of all owners if `owner` is None, only active ones if `active`.

        Only those created `before` a time or at it, if one is given.
        """
        ...

    async def session_ids(
        self, owner: str, offset: int, limit: int, *, project_id: str | None = None
    ) -> Sequence[str]:
        """A page of an owner's sessions, newest first."""
        ...

    async def ids_of_session(self, session_id: str) -> tuple[Sequence[str], Sequence[str]]:
        """The ids of a session's models and of its samplers, oldest first."""
        ...

    async def count_sessions(
        self, owner: str | None = None, *, active: bool = False, heartbeats: bool = False
    ) -> int:
        """How many there are; only those that send `heartbeats`, if that is asked for."""
        ...

    async def silent_sessions(self, before: float) -> Sequence[StoredSession]:
        """Active sessions with heartbeats of which the last came before a time."""
        ...

    async def unattended_sessions(self, before: float, limit: int) -> Sequence[StoredSession]:
        """Active sessions without heartbeats and open models that were made before a time."""
        ...

    async def touch_session(self, session_id: str, at: float) -> StoredSession | None:
        """Note a heartbeat and return the session; one that is over stays over.

        The note may be lost in a crash: `touch_sessions` follows every start.
        """
        ...

    async def touch_sessions(self, at: float) -> None:
        """Count every active session with heartbeats as seen: they could not reach the server."""
        ...

    async def add_model(
        self,
        model: Model,
        *,
        max_models: int | None = None,
        max_runs: int | None = None,
        silent_since: float = 0.0,
    ) -> Model | LimitReached:
        """Keep a model, unless its owner has too many that are alive, or too many runs.

        Alive is an open model of an active session; of a session without heartbeats, only if the
        model had a request after `silent_since`. Counted and stored in one step.
        """
        ...

    async def put_model(self, model: Model) -> None: ...
    async def change_model(self, model_id: str, **fields: Any) -> None:
        """Change some fields of a model; unknown ones stay unknown.

        A node changes `snapshot_*` and `corrupted` only of a model that it has adopted.
        """
        ...

    async def move_model(self, model: Model, session_id: str) -> bool:
        """Give a model to another session; False when it was moved, or its session has ended."""
        ...

    async def get_model(self, model_id: str) -> Model | None: ...
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
        """Newest first.

        If `published_at` is given, also those of others than `owner` that have a public checkpoint
        at that time.
        """
        ...

    async def count_models(
        self, owner: str, *, project_id: str | None = None, published_at: float | None = None
    ) -> int:
        """How many `models` would return without a limit, closed ones too."""
        ...

    async def open_models(self, owner: str | None = None) -> Sequence[Model]:
        """The models that are not closed, oldest first."""
        ...

    async def add_sampler(
        self, sampler: StoredSampler, *, max_samplers: int | None = None
    ) -> StoredSampler | LimitReached:
        """Keep a sampler, unless its session has too many; counted and stored in one step."""
        ...

    async def put_sampler(self, sampler: StoredSampler) -> None: ...
    async def get_sampler(self, sampler_id: str) -> StoredSampler | None: ...
    async def samplers(
        self,
        session_id: str | None = None,
        *,
        model_id: str | None = None,
        location: str | None = None,
        unsaved: bool = False,
        located: bool = False,
    ) -> Sequence[StoredSampler]:
        """Oldest first; if `unsaved`, those whose weights are in the engine's memory only.

        If `located`, those whose weights are in a file.
        """
        ...

    async def close_samplers(
        self, sampler_ids: Iterable[str], why: str = "its session is over"
    ) -> None:
        """Note at once that these have no weights any more, and the reason users are given.

        They stay known until `prune`, without a location and a size. Unknown ones are ignored; a
        sampler that was closed before keeps its first reason.
        """
        ...

    async def join_sampler(self, sampler_id: str) -> int:
        """Count one more copy of a known sampling client; the first copy is 1."""
        ...

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Store a checkpoint, in place of one with the same path."""
        ...

    async def change_checkpoint(self, checkpoint: StoredCheckpoint, **fields: Any) -> bool:
        """Change some fields of a checkpoint; False when it is gone or was overwritten."""
        ...

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None: ...
    async def delete_checkpoint(self, checkpoint: StoredCheckpoint) -> bool:
        """Forget a checkpoint; False when it is gone or was overwritten."""
        ...

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
        """Newest first; only those that still exist, or whose time is up, at a given time."""
        ...

    async def newest_checkpoints(
        self,
        model_ids: Collection[str],
        *,
        kinds: Collection[CheckpointKind],
        live_at: float,
        public: bool = False,
    ) -> Sequence[StoredCheckpoint]:
        """The newest checkpoint of each of these models and kinds, as far as there is one."""
        ...

    async def count_checkpoints(
        self,
        owner: str,
        *,
        live_at: float,
        kinds: Collection[CheckpointKind] | None = None,
        project_id: str | None = None,
    ) -> int:
        """How many checkpoints of an owner exist at a time."""
        ...

    async def kept(self, owner: str) -> Mapping[Part, KeptPart]:
        """Everything that is kept for an owner: how much, and what it takes up.

        Checkpoints count until they are deleted, samplers while they are in a file.
        """
        ...

    async def stored_by_project(
        self, owner: str, *, live_at: float, project_id: str | None = None
    ) -> Mapping[str | None, KeptPart]:
        """The checkpoints of an owner that exist at a time, by project."""
        ...

    async def saved_by_session(self, session_id: str) -> tuple[int, int]:
        """How many checkpoints the models of a session have, and what they take up."""
        ...

    async def add_loss(
        self, loss: StoredLoss, *, max_losses: int | None = None
    ) -> StoredLoss | LimitReached:
        """Keep a loss, unless its session has too many; counted and stored in one step."""
        ...

    async def get_loss(self, loss_id: str) -> StoredLoss | None: ...

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        """Accept an operation and say whether it is new.

        One with a known `op_id` changes nothing and is answered by the first. A new one is its
        model's last request.
        """
        ...

    async def get_operation(self, op_id: str) -> Operation | None:
        """One operation: with its body while it is unfinished, with its result after that."""
        ...

    async def pending(self, key: str | None = None) -> Sequence[Operation]:
        """Everything accepted and not finished, in order of arrival.

        Of one model or sampler, if its `key` is given. On a node, only of keys it has adopted.
        """
        ...

    async def operations(self, session_id: str) -> Sequence[Operation]:
        """The operations of a session in order of arrival, without bodies and results."""
        ...

    async def start(self, op_ids: Iterable[str], at: float) -> None:
        """Note that operations run; after a restart they are queued again."""
        ...

    async def finish(
        self, op_id: str, outcome: OperationOutcome, at: float, usage: UsageEntry | None = None
    ) -> bool:
        """Record how an operation ended and what it used; False when it had ended before.

        A success may be undone by a power cut, as long as nothing was submitted after it: then
        the operation is unfinished again.
        """
        ...

    # A model's journal is its operations with their bodies. A crash replays what a snapshot does
    # not hold, so bodies outlive the results until they are trimmed.

    async def journal(self, model_id: str, after: int) -> Sequence[Operation]:
        """The operations of a model with a seq_id above `after`, by seq_id, finished ones too.

        They have their bodies unless those were trimmed, and no results.
        """
        ...

    async def trim_journal(self, model_id: str, through: int) -> None:
        """Forget the bodies of a model's finished operations up to a seq_id."""
        ...

    async def last_turn(self, model_id: str) -> int:
        """The highest finished seq_id of a model, -1 when there is none."""
        ...

    async def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        """Samples of one client that ended after a cursor, and the new cursor."""
        ...

    async def drop_results(self, op_ids: Iterable[str]) -> None:
        """Forget the payloads, not the operations."""
        ...

    async def drop_results_before(self, at: float) -> int:
        """Forget the payloads of everything that finished before a time."""
        ...

    async def forget_operations_before(self, at: float) -> int:
        """Forget what finished before a time altogether, unless a journal still has its body.

        The last turn of an open model stays, so that its numbers continue from there.
        """
        ...

    async def prune(self, before: float, limit: int) -> int:
        """Forget some of what ended before a time; returns how many records, 0 when none is left.

        That is sessions that are over, or never send heartbeats, with their samplers, losses,
        operations and answers, and answers of no session. Models and checkpoints stay, and so does
        a session with an open model, with a sampler that has a location, or with an operation that
        ended later. A call forgets at most `limit` records, so that it is short.
        """
        ...

    async def probe(self, size_bytes: int) -> None:
        """Write that much and delete it again; raises `StorageError` when it cannot be kept."""
        ...

    async def recall(self, owner: str, key: str) -> str | None:
        """The answer remembered for an idempotency key."""
        ...

    async def remember(
        self, owner: str, key: str, answer: str, *, session_id: str | None = None
    ) -> str:
        """Keep the first answer: as long as a session is known, or until it is pruned by age.

        Returns the one that counts, which another node may have given at the same moment.
        """
        ...

    async def add_key(self, key: ApiKey) -> ApiKey:
        """Keep a key; the one that is returned has its final `key_id`."""
        ...

    async def find_key(self, key_hash: str) -> ApiKey | None: ...
    async def get_key(self, key_id: int) -> ApiKey | None: ...
    async def any_key(self, at: float) -> bool:
        """Whether there is a key that is neither revoked nor expired."""
        ...

    def use_key(self, key_id: int, at: float) -> None:
        """Note that a key was used; written soon, and a crash may lose it."""
        ...

    async def keys(self, owner: str | None = None) -> Sequence[ApiKey]:
        """Oldest first, revoked ones too."""
        ...

    async def revoke_key(self, key_id: int, at: float) -> bool:
        """Revoke a key; False when there is none such in use."""
        ...

    # The audit log is only added to; its lines go by their age alone.

    async def audit(self, entry: AuditEntry) -> None: ...
    def refused(self, refusal: Refusal, at: float) -> None:
        """Count a refused attempt; the log gets one line per minute for equal ones."""
        ...

    async def forget_audit_before(self, at: float, limit: int) -> int:
        """Forget some lines that are older than a time; returns how many."""
        ...

    async def audit_log(
        self,
        owner: str | None,
        *,
        topic: str | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int | None = None,
    ) -> Sequence[AuditEntry]:
        """By time, from `start` to before `end`; the newest, if there are more than `limit`.

        Of all owners and the server itself, if `owner` is None.
        """
        ...

    async def add_usage(self, entry: UsageEntry) -> None:
        """Count what was used; of samples, a crash may lose the last second."""
        ...

    async def usage(self, owner: str, start: float, end: float) -> Sequence[HourOfUsage]:
        """What an owner used from one full hour to before another, summed up by the hour.

        By hour, session and kind.
        """
        ...
