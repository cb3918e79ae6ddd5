"""Usage as the service bills it, stored bytes, and the audit log."""

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field

from tinkex.types.value import Request, Response


class GetBillingUsageRequest(Request):
    """A window of time; both ends are whole UTC hours."""

    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(Response, tag_field="type", tag="training"):
    """Tokens trained on."""

    token_count: int
    if TYPE_CHECKING:
        type: Literal["training"] = "training"


class SamplingPrefillBillingEvent(Response, tag_field="type", tag="sampling_prefill"):
    """Prompt tokens."""

    cached: bool
    token_count: int
    if TYPE_CHECKING:
        type: Literal["sampling_prefill"] = "sampling_prefill"


class SamplingSampleBillingEvent(Response, tag_field="type", tag="sampling_sample"):
    """Generated tokens."""

    token_count: int
    if TYPE_CHECKING:
        type: Literal["sampling_sample"] = "sampling_sample"


class CheckpointBillingEvent(Response, tag_field="type", tag="checkpoint"):
    """Checkpoint operations."""

    count: int
    if TYPE_CHECKING:
        type: Literal["checkpoint"] = "checkpoint"


class StorageBillingEvent(Response, tag_field="type", tag="storage"):
    """Storage."""

    gigabyte_hours: float
    if TYPE_CHECKING:
        type: Literal["storage"] = "storage"


BillingEventInfo = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)
"""What was used, and how much of it."""


class BillingUsageEvent(Response):
    """One hour of one kind of use; costs are estimates before discounts."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Response):
    """What is known about a session in a usage report."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Response):
    """Usage by the hour; costs up to `cost_data_through` are invoiced ones."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = field(default_factory=dict[str, BillingUsageSession])
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Request):
    """Ask for the size of stored checkpoints, in one project or in all."""

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Response):
    """Stored checkpoints of one owner in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    """Stored checkpoints now."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


class AuditLogEntry(Response):
    """One event; `model_id`, `tinker_path` and `purpose` repeat details and are deprecated."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = field(default_factory=dict[str, Any])
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    """Events in order of time."""

    entries: list[AuditLogEntry]
