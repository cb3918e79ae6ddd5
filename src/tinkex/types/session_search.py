"""Searching sessions, and the status each can have."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, field

from tinkex.types.value import Request, Response

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]
"""How a client closed its session."""


class OwnSearchOwner(Request, tag_field="type", tag="own"):
    """The caller's own sessions."""

    if TYPE_CHECKING:
        type: Literal["own"] = "own"


class AccessibleSearchOwner(Request, tag_field="type", tag="accessible"):
    """Every session the caller may see."""

    if TYPE_CHECKING:
        type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request, tag_field="type", tag="user"):
    """The sessions of these users."""

    owner_urns: Annotated[list[str], Meta(min_length=1, max_length=10)]
    if TYPE_CHECKING:
        type: Literal["user"] = "user"


SearchOwner = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner
"""Whose sessions to search."""


class ActiveSessionStatusQuery(Request, tag_field="type", tag="active"):
    """Running sessions."""

    if TYPE_CHECKING:
        type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request, tag_field="type", tag="cancelled"):
    """Cancelled sessions."""

    if TYPE_CHECKING:
        type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request, tag_field="type", tag="failed"):
    """Failed sessions."""

    if TYPE_CHECKING:
        type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request, tag_field="type", tag="client_finished"):
    """Sessions their client closed, for any reason or for these."""

    reasons: Annotated[list[ClientSessionFinishReasonType], Meta(min_length=1)] | None = None
    if TYPE_CHECKING:
        type: Literal["client_finished"] = "client_finished"


SessionStatusQuery = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)
"""A status to search for."""


class SessionSearchCursor(Response):
    """Where the next page of a search starts."""

    last_created_at: Annotated[datetime, Meta(tz=True)]
    last_session_id: str


class SessionSearchRequest(Request):
    """What to search for. Id and name match as either/or; all metadata pairs must match."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    display_name: Annotated[str, Meta(min_length=1)] | None = None
    owner: SearchOwner = field(default_factory=OwnSearchOwner)
    statuses: Annotated[list[SessionStatusQuery], Meta(min_length=1)] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class SessionActive(Response, tag_field="type", tag="active"):
    """The session is running."""

    if TYPE_CHECKING:
        type: Literal["active"] = "active"


class SessionCancelled(Response, tag_field="type", tag="cancelled"):
    """The session was cancelled."""

    detail: str | None = None
    if TYPE_CHECKING:
        type: Literal["cancelled"] = "cancelled"


class SessionFailedRequestReason(Response, tag_field="type", tag="request"):
    """A request failed."""

    request_id: str
    request_type: str
    if TYPE_CHECKING:
        type: Literal["request"] = "request"


class SessionFailedTrainingRunReason(Response, tag_field="type", tag="training_run"):
    """A training run failed."""

    training_run_id: str
    if TYPE_CHECKING:
        type: Literal["training_run"] = "training_run"


class SessionFailedSamplingSessionReason(Response, tag_field="type", tag="sampling_session"):
    """A sampling session failed."""

    sampling_session_id: str
    if TYPE_CHECKING:
        type: Literal["sampling_session"] = "sampling_session"


SessionFailedReason = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)
"""Which part of a session failed."""


class SessionFailed(Response, tag_field="type", tag="failed"):
    """The session failed."""

    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str
    if TYPE_CHECKING:
        type: Literal["failed"] = "failed"


class ClientSessionFinishSuccess(Response, tag_field="type", tag="success"):
    """Closed after success."""

    if TYPE_CHECKING:
        type: Literal["success"] = "success"


class ClientSessionFinishErrored(Response, tag_field="type", tag="errored"):
    """Closed after an error."""

    if TYPE_CHECKING:
        type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Response, tag_field="type", tag="interrupted"):
    """Closed by an interrupt."""

    if TYPE_CHECKING:
        type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
"""How a client closed its session, as an object."""


class ClientSessionFinished(Response, tag_field="type", tag="client_finished"):
    """The client closed the session."""

    reason: ClientSessionFinishReason
    detail: str | None = None
    if TYPE_CHECKING:
        type: Literal["client_finished"] = "client_finished"


SessionStatus = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive
"""The status of a session."""


class SessionSummary(Response):
    """One session that a search found."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    """A page of sessions, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
