"""The seam to whatever remembers: sessions, models, operations, checkpoints.

A store only remembers. Who may see a record is decided by the handlers, when an operation
runs by the scheduler. What a method has returned from is durable, as far as the
implementation promises durability at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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


class Store(Protocol):
    """Memory for tests, a database for real."""

    # `put_*` stores or replaces. `add_*` keeps the first record of an id and returns it, so
    # that a repeated request finds what the first one made.

    async def put_session(self, session: Session) -> None: ...
    async def get_session(self, session_id: str) -> Session | None: ...
    async def sessions(self, owner: str | None = None) -> Sequence[Session]:
        """Newest first; of everybody when `owner` is None."""
        ...

    async def add_model(self, model: Model) -> Model: ...
    async def put_model(self, model: Model) -> None: ...
    async def get_model(self, model_id: str) -> Model | None: ...
    async def models(
        self, *, owner: str | None = None, session_id: str | None = None
    ) -> Sequence[Model]:
        """Newest first."""
        ...

    async def add_sampler(self, sampler: Sampler) -> Sampler: ...
    async def get_sampler(self, sampler_id: str) -> Sampler | None: ...
    async def samplers(self, session_id: str | None = None) -> Sequence[Sampler]:
        """Oldest first."""
        ...

    async def join_sampler(self, sampler_id: str) -> int:
        """Count one more copy of a sampling client; the first copy is 1."""
        ...

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None: ...
    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None: ...
    async def delete_checkpoint(self, path: str) -> bool: ...
    async def checkpoints(
        self, *, owner: str | None = None, model_id: str | None = None
    ) -> Sequence[StoredCheckpoint]:
        """Newest first."""
        ...

    async def add_loss(self, loss: StoredLoss) -> StoredLoss: ...
    async def get_loss(self, loss_id: str) -> StoredLoss | None: ...

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        """Accept an operation and say whether it is new.

        One with a known `op_id` changes nothing and is answered by the first.
        """
        ...

    async def get_operation(self, op_id: str) -> Operation | None: ...
    async def pending(self) -> Sequence[Operation]:
        """Everything accepted and not finished, in order of arrival."""
        ...

    async def operations(self, session_id: str) -> Sequence[Operation]:
        """The operations of a session, in order of arrival."""
        ...

    async def start(self, op_ids: Iterable[str], at: float) -> None: ...

    async def finish(self, op_id: str, outcome: Outcome, at: float) -> bool:
        """Record how an operation ended; False when it had ended before."""
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

    async def recall(self, owner: str, key: str) -> str | None:
        """The answer remembered for an idempotency key."""
        ...

    async def remember(self, owner: str, key: str, answer: str) -> None: ...

    async def audit(self, entry: AuditEntry) -> None: ...
    async def audit_log(self, owner: str) -> Sequence[AuditEntry]: ...
    async def add_usage(self, entry: UsageEntry) -> None: ...
    async def usage(self, owner: str, start: float, end: float) -> Sequence[UsageEntry]: ...
