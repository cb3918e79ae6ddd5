"""What the server remembers, as plain frozen values.

Times are seconds since the epoch. A record is changed by storing a changed copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tinkex.types import SessionActive, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOutcome:
    """How an operation ended: an encoded result, or an error.

    `body` is None once the payload was dropped; `size_bytes` keeps its length.
    """

    body: bytes | None = None
    size_bytes: int = 0
    error: str | None = None
    category: ErrorCategory = "unknown"
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
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
    request: object = field(default=None, compare=False, repr=False)
    seq_id: int = 0
    model_id: str | None = None
    sampler_id: str | None = None
    clone: int = 0
    sequence_ids: tuple[str, ...] = ()
    state: OpState = "queued"
    started_at: float | None = None
    finished_at: float | None = None
    outcome: OperationOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The request of a training operation that is decoded only when it runs.

    In the engine's process where that has a decoder, otherwise by `decode`.
    """

    decode: Callable[[], ForwardBackwardInput]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """The stored form of load_weights: whose checkpoints may be read, but no token."""

    path: str
    optimizer: bool
    readers: tuple[str, ...]
    creates_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One line of the audit log."""

    at: float
    owner: str
    topic: Literal["checkpoints", "projects", "teams", "organizations"]
    event: str
    details: Mapping[str, object] = field(default_factory=dict[str, object])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key. The key itself is shown once and never stored."""

    key_id: int
    key_hash: str
    owner: str
    name: str
    created_at: float
    note: str = ""
    revoked_at: float | None = None
