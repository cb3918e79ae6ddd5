"""What the server remembers, as plain frozen values.

Times are seconds since the epoch. A record is changed by storing a changed copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from tinkex.types import SessionActive, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tinkex.errors import ErrorCategory
    from tinkex.types import (
        CustomLossGraph,
        CustomLossInput,
        ForwardBackwardInput,
        LoraConfig,
        OptimizerConfig,
        SessionStatus,
    )

OpKind = Literal[
    "create_model",
    "load_weights",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "unload_model",
    "create_custom_loss",
    "sample",
]
OpState = Literal["queued", "running", "done"]
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
AuditTopic = Literal[
    "checkpoints", "projects", "teams", "organizations", "sessions", "settings", "refused"
]
Part = Literal["checkpoints", "samplers", "losses", "requests", "results", "sessions", "runs"]
"""What counts towards `max_stored_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A client's session. Only sessions with `heartbeats` end by a time-out."""

    session_id: str
    owner: str
    created_at: float
    last_seen_at: float
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    project_id: str | None = None
    display_name: str | None = None
    heartbeats: bool = True
    status: SessionStatus = field(default_factory=SessionActive)

    @property
    def active(self) -> bool:
        """Whether new work is accepted."""
        return isinstance(self.status, SessionActive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A training run: one adapter on a base model."""

    model_id: str
    owner: str
    session_id: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    created_at: float
    last_request_at: float
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    project_id: str | None = None
    corrupted: bool = False
    # What a crash goes back to: the engine's name for the state after request `snapshot_seq`.
    snapshot_location: str | None = None
    snapshot_seq: int = -1

    @property
    def closed(self) -> bool:
        """Whether it can never run again: unloaded, its session over, or only made to be listed."""
        return self.snapshot_seq >= 0 and self.snapshot_location is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSampler:
    """A frozen choice of weights to sample from.

    A `snapshot` is in the engine's memory only, until a `location` says where it was saved and
    `size_bytes` how large that file is; `model_id` and `seq_id` name the request that published
    it. A sampler whose weights were given up says why in `dropped`.
    """

    sampler_id: str
    owner: str
    session_id: str
    base_model: str
    created_at: float
    model_path: str | None = None
    snapshot: str | None = None
    location: str | None = None
    model_id: str | None = None
    seq_id: int | None = None
    dropped: str | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Saved weights. `location` is the engine's name for them and is never reused."""

    path: str
    owner: str
    model_id: str
    kind: CheckpointKind
    name: str
    location: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    has_optimizer: bool
    created_at: float
    size_bytes: int
    public: bool = False
    user_metadata: Mapping[str, str] | None = None
    expires_at: float | None = None
    project_id: str | None = None
    # Public keys that an export is encrypted for; None for what is not encrypted.
    age_recipients: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLoss:
    """An uploaded custom loss."""

    loss_id: str
    owner: str
    session_id: str
    inputs: tuple[CustomLossInput, ...]
    graph: CustomLossGraph
    size_bytes: int = 0


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an operation ended: an encoded result, or an error.

    `body` is None once the payload was dropped; `size_bytes` keeps its length.
    """

    body: bytes | None = None
    size_bytes: int = 0
    error: str | None = None
    category: ErrorCategory = "unknown"
    usage: Usage = Usage()


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request. `op_id` is its request id and names it for ever.

    `body` is the request as it came, decompressed, and what a restart runs it from; it is kept
    until a snapshot makes it unnecessary. `request` is its decoded form, in memory only and only
    in the process that accepted it. Samples have no body: a restart loses them.
    """

    op_id: str
    kind: OpKind
    owner: str
    session_id: str
    created_at: float
    body: bytes = b""
    media: str = "application/json"
    request: Any = None
    seq_id: int = 0
    model_id: str | None = None
    sampler_id: str | None = None
    clone: int = 0
    sequence_ids: tuple[str, ...] = ()
    state: OpState = "queued"
    started_at: float | None = None
    finished_at: float | None = None
    outcome: OperationOutcome | None = None


R = TypeVar("R", Operation, OperationOutcome)


def changed(record: R, **members: Any) -> R:
    """A copy with other members. Every operation is copied some times, so this must be cheap."""
    return msgspec.structs.replace(record, **members)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The request of a training operation that is decoded only when it runs.

    In the engine's process where that has a decoder, otherwise by `decode`. `custom_loss` is the
    config of an uploaded loss, which is looked up before that.
    """

    decode: Callable[[], ForwardBackwardInput]
    custom_loss: Mapping[str, float | str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """The stored form of load_weights: whose checkpoints may be read, but no token."""

    path: str
    optimizer: bool
    readers: tuple[str, ...]
    creates_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One line of the audit log: what changed, by whom, from where.

    `owner` is the tenant it concerns, empty for the server itself. `key_id` is the stored key that
    was used, if one was.
    """

    at: float
    owner: str
    topic: AuditTopic
    event: str
    details: Mapping[str, object] = field(default_factory=dict[str, object])
    key_id: int | None = None
    address: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An attempt that was refused. The audit log has one line per minute for equal ones."""

    owner: str
    event: str
    key_id: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """What one finished operation used."""

    at: float
    owner: str
    session_id: str
    base_model: str | None
    project_id: str | None
    kind: OpKind
    usage: Usage


HOUR_S: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class HourOfUsage:
    """What the operations of one kind used in an hour, of one session, base model and project.

    `hour` is the time at which it began. `count` is how many operations there were, except for
    samples, which a store may have summed up before.
    """

    hour: int
    session_id: str
    base_model: str | None
    project_id: str | None
    kind: OpKind
    count: int
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key and what it may do. The key itself is shown once and never stored.

    `project_id` limits it to one project, `routes` to some groups of routes; None is no limit.
    """

    key_id: int
    key_hash: str
    owner: str
    name: str
    created_at: float
    note: str = ""
    revoked_at: float | None = None
    read_only: bool = False
    project_id: str | None = None
    routes: tuple[str, ...] | None = None
    expires_at: float | None = None
    last_used_at: float | None = None


@dataclass(frozen=True, slots=True)
class LimitReached:
    """Nothing was stored: the owner has `have` of what `setting` limits."""

    setting: str
    have: int


@dataclass(frozen=True, slots=True)
class KeptPart:
    """How many records of one kind an owner has, and how many bytes they take."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Room in an owner's quota that something on its way holds."""

    reservation_id: str
    owner: str
    size_bytes: int
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class Occupied:
    """What takes up an owner's quota: what is kept, and what other reservations hold."""

    kept: Mapping[Part, int]
    """Bytes by part."""
    kept_checkpoints: int = 0
    reserved_bytes: int = 0
    reserved_checkpoints: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in all."""
        return sum(self.kept.values()) + self.reserved_bytes

    @property
    def checkpoints(self) -> int:
        """Checkpoints in all."""
        return self.kept_checkpoints + self.reserved_checkpoints

    def leaves(self, wanted: Reserved, max_bytes: int, max_checkpoints: int) -> bool:
        """Whether there is room for one more reservation."""
        few = not wanted.checkpoints or self.checkpoints + wanted.checkpoints <= max_checkpoints
        return few and self.size_bytes + wanted.size_bytes <= max_bytes


def occupied(
    kept: Mapping[Part, KeptPart], reserved: Iterable[Reserved], wanted: Reserved
) -> Occupied:
    """The sum of what is kept for an owner and of its reservations, without the one wanted."""
    held = [
        each
        for each in reserved
        if each.owner == wanted.owner and each.reservation_id != wanted.reservation_id
    ]
    return Occupied(
        {part: found.size_bytes for part, found in kept.items()},
        kept["checkpoints"].count,
        sum(each.size_bytes for each in held),
        sum(each.checkpoints for each in held),
    )


ROW_BYTES: Final = 512
"""What a record counts for besides its texts."""


def row_bytes(record: StoredSession | Model | StoredCheckpoint) -> int:
    """What the texts of a record take up, about."""
    texts = [*(record.user_metadata or {}), *map(str, (record.user_metadata or {}).values())]
    if isinstance(record, StoredSession):
        texts += (*record.tags, record.display_name or "", record.sdk_version)
    texts.append(record.project_id or "")
    return ROW_BYTES + sum(len(text.encode(errors="replace")) for text in texts)
