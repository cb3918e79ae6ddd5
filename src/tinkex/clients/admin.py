"""`AdminClient`: an organisation's audit log, usage and storage."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Literal, get_args

from tinkex.clients.arguments import given_text, one_of
from tinkex.clients.base_client import ResourceClient
from tinkex.clients.twins import submitting
from tinkex.errors import InputError, InputTypeError
from tinkex.wire import routes

if TYPE_CHECKING:
    from tinkex.types import (
        AuditLogResponse,
        BillingUsageResponse,
        CurrentCheckpointStorageUsageResponse,
    )

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
LONGEST_USAGE_WINDOW = timedelta(days=14)


class AdminClient(ResourceClient):
    """Reads what an administrator may see; needs no session.

    Every method has two colours: `x()` returns a future at once, `x_async()` the value.
    """

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        """Who did what, of one kind or all, on one UTC day or lately."""
        one_of(event_type, get_args(AuditEventType), "event_type")
        if day is not None and (isinstance(day, datetime) or not isinstance(day, date)):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's value
            raise InputTypeError(f"must be a datetime.date, not {type(day).__name__}", "day")
        return await self._call(
            "get_audit_log",
            routes.GET_AUDIT_LOG,
            query={"event_type": event_type, "day": None if day is None else day.isoformat()},
        )

    get_audit_log = submitting(get_audit_log_async)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        """Usage by the hour between two full UTC hours, at most 14 days apart.

        A time without a zone is taken as UTC.
        """
        start = _full_hour(starting_on, "starting_on")
        end = _full_hour(ending_before, "ending_before")
        if not timedelta(0) < end - start <= LONGEST_USAGE_WINDOW:
            raise InputError("must be after starting_on, by at most 14 days", "ending_before")
        return await self._call(
            "get_billing_usage",
            routes.GET_BILLING_USAGE,
            query={"starting_on": _rfc3339(start), "ending_before": _rfc3339(end)},
        )

    get_billing_usage = submitting(get_billing_usage_async)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        """What the stored checkpoints take up now, by project and owner."""
        if project_id is not None:
            given_text(project_id, "project_id")
        return await self._call(
            "get_current_checkpoint_storage_usage",
            routes.GET_CHECKPOINT_STORAGE_USAGE,
            query={"project_id": project_id},
        )

    get_current_checkpoint_storage_usage = submitting(get_current_checkpoint_storage_usage_async)


def _full_hour(value: datetime | str, name: str) -> datetime:
    time = _time(value, name)
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    in_utc = time.astimezone(UTC)
    if in_utc != in_utc.replace(minute=0, second=0, microsecond=0):
        raise InputError(
            f"must be a full UTC hour, such as 2026-01-31T15:00:00Z, not {value}", name
        )
    return time


def _time(value: datetime | str, name: str) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(given_text(value, name))
    except (OverflowError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"must be an RFC 3339 time such as 2026-01-31T15:00:00Z, not {value!r}", name
        ) from None


def _rfc3339(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
