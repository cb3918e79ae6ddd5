"""Bodies of requests and answers that are no part of the public types.

The public types in `tinkex.types` describe what a user handles. These few exist only between
client and server: small hand-built requests, and answers a client turns into something else.
"""

# Without `from __future__ import annotations`: msgspec resolves these annotations.
from datetime import datetime
from typing import Literal

import msgspec

from tinkex.types import ClientSessionFinishReason, LoraConfig
from tinkex.types.optimizers import OptimizerConfigField, optimizer_config


class WireBody(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the bodies in this module."""


class AuthTokenRequest(WireBody, frozen=True):
    """Exchange the credential in `X-API-Key` for a token; the body is an empty object."""


class FinishSessionRequest(WireBody, frozen=True):
    """Close a session. `detail` is sent as null when there is none."""

    reason: ClientSessionFinishReason
    detail: str | None = None


class SetProjectRequest(WireBody, frozen=True):
    """Move a session into a project."""

    project_id: str


class SetTtlRequest(WireBody, frozen=True):
    """Set a checkpoint's lifetime. None is sent as null and removes the expiry."""

    ttl_seconds: int | None


class WeightsInfoRequest(WireBody, frozen=True):
    """Ask what is needed to rebuild a run from a checkpoint."""

    tinker_path: str


class CancelFutureRequest(WireBody, frozen=True):
    """Withdraw an accepted request."""

    request_id: str


class ReleaseNumbersRequest(WireBody, frozen=True):
    """Training requests that will not be sent, or are to be dropped if they were."""

    model_id: str
    seq_ids: list[int]


class AttachModelRequest(WireBody, frozen=True):
    """Move an open model to this session, which belongs to the program that asks."""

    model_id: str
    session_id: str


class AttachModelResponse(WireBody, frozen=True):
    """The model is the session's; its next training request has the number `next_seq_id`."""

    model_id: str
    next_seq_id: int
    base_model: str
    lora_config: LoraConfig
    optimizer_config: OptimizerConfigField

    def __post_init__(self) -> None:
        config = optimizer_config(self.optimizer_config, "optimizer_config")
        msgspec.structs.force_setattr(self, "optimizer_config", config)


class TraceExportResponse(WireBody, frozen=True):
    """How far the export of a session's trace is; `url` is set once it is ready."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class ArchiveUrlResponse(WireBody, frozen=True):
    """Where an older client downloads a checkpoint."""

    url: str
    expires: datetime


class TokenizerResponse(WireBody, frozen=True):
    """What turns text into a base model's tokens: a `tokenizer.json`, and what belongs to it."""

    tokenizer: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None


ImportedKind = Literal["weights", "sampler_weights"]
"""What an imported adapter becomes: something to train on and sample from, or to sample from."""


class ImportWeightsResponse(WireBody, frozen=True):
    """Where an uploaded adapter is kept."""

    tinker_path: str


class ApiKeyOrganization(WireBody, frozen=True):
    """The organisation behind a key."""

    name: str


class ApiKeyUser(WireBody, frozen=True):
    """The person behind a key."""

    email: str


class ApiKeyDetails(WireBody, frozen=True):
    """Whose key it is."""

    org_details: ApiKeyOrganization
    user_details: ApiKeyUser


class ApiKeyResponse(WireBody, frozen=True):
    """The key a request was made with."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


# Members that are sent as null when they are None. Everywhere else a declared member that is
# None is left out; the two bodies below say something different with a null.
EXPLICIT_NULLS: dict[type, frozenset[str]] = {
    FinishSessionRequest: frozenset({"detail"}),
    SetTtlRequest: frozenset({"ttl_seconds"}),
}
