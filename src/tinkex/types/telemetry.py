"""Telemetry events and the batches they are sent in."""

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field

from tinkex.types.value import Request, Response

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
"""Kinds of events."""

Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
"""The severity of an event."""


class SessionStartEvent(Response, tag_field="event", tag="SESSION_START"):
    """A session began."""

    if TYPE_CHECKING:
        event: EventType = "SESSION_START"
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionEndEvent(Response, tag_field="event", tag="SESSION_END"):
    """A session ended; `duration` reads like `0:00:12.345678`."""

    duration: str
    if TYPE_CHECKING:
        event: EventType = "SESSION_END"
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class UnhandledExceptionEvent(Response, tag_field="event", tag="UNHANDLED_EXCEPTION"):
    """An exception reached the user."""

    error_message: str
    error_type: str
    if TYPE_CHECKING:
        event: EventType = "UNHANDLED_EXCEPTION"
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    traceback: str | None = None


class GenericEvent(Response, tag_field="event", tag="GENERIC_EVENT"):
    """Anything else, by name."""

    if TYPE_CHECKING:
        event: EventType = "GENERIC_EVENT"
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    event_data: dict[str, Any] = field(default_factory=dict[str, Any])


TelemetryEvent = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
"""Any event."""


class TelemetryBatch(Response):
    """Events of one process."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetrySendRequest(Request):
    """A batch to send."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetryResponse(Response):
    """The batch arrived."""

    status: Literal["accepted"]
