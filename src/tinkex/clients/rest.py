"""`RestClient`: runs, checkpoints, sessions and samplers that a server keeps."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tinkex.clients.admin import AdminClient, AuditEventType
from tinkex.clients.arguments import given_text
from tinkex.clients.base_client import AccessScope, checkpoint_of, page, scope
from tinkex.clients.rest_checkpoints import CheckpointCalls
from tinkex.clients.twins import on_loop, submitting
from tinkex.errors import (
    ExperimentalWarning,
    InputTypeError,
    ResultError,
    ServerSilentError,
)
from tinkex.transport.auth import read_claims
from tinkex.types import SessionSearchRequest, WhoamiResponse
from tinkex.wire import bodies, routes

if TYPE_CHECKING:
    from datetime import date, datetime

    from tinkex.futures.future import APIFuture
    from tinkex.types import (
        AuditLogResponse,
        BillingUsageResponse,
        CurrentCheckpointStorageUsageResponse,
        GetSamplerResponse,
        GetSessionResponse,
        ListSessionsResponse,
        SessionSearchResponse,
        TrainingRun,
        TrainingRunsResponse,
    )

_EXPORT_POLL_S = 5.0
# A trace is written in minutes; a job that is "pending" for an hour is stuck.
_EXPORT_DEADLINE_S = 3600.0


class RestClient(CheckpointCalls):
    """Looks after what a server keeps; needs no session.

    Every method has two colours: `x()` returns a future at once, `x_async()` the value. Bad
    arguments are refused before anything is sent, and like every error come out of the future.
    """

    # -- runs ---------------------------------------------------------------------------------

    async def get_training_run_async(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        """One training run."""
        return await self._call(
            "get_training_run",
            routes.GET_TRAINING_RUN,
            params={"run": given_text(training_run_id, "training_run_id")},
            query=scope(access_scope),
        )

    get_training_run = submitting(get_training_run_async)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        """The training run that a checkpoint comes from."""
        return await self._call(
            "get_training_run_by_tinker_path",
            routes.GET_TRAINING_RUN,
            params={"run": checkpoint_of(tinker_path)["run"]},
            query=scope(access_scope),
        )

    get_training_run_by_tinker_path = submitting(get_training_run_by_tinker_path_async)

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> TrainingRunsResponse:
        """A page of training runs, of one project or of all."""
        if project_id is not None:
            given_text(project_id, "project_id")
        return await self._call(
            "list_training_runs",
            routes.LIST_TRAINING_RUNS,
            query={**page(limit, offset), **scope(access_scope), "project_id": project_id},
        )

    list_training_runs = submitting(list_training_runs_async)

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        """What a sampler samples from."""
        return await self._call(
            "get_sampler",
            routes.GET_SAMPLER,
            params={"sampler": given_text(sampler_id, "sampler_id")},
        )

    get_sampler = submitting(get_sampler_async)

    # -- sessions -----------------------------------------------------------------------------

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> GetSessionResponse:
        """The runs and samplers of a session."""
        return await self._call(
            "get_session",
            routes.GET_SESSION,
            params={"session": given_text(session_id, "session_id")},
            query=scope(access_scope),
        )

    get_session = submitting(get_session_async)

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        """A page of session ids."""
        return await self._call(
            "list_sessions",
            routes.LIST_SESSIONS,
            query={**page(limit, offset), **scope(access_scope)},
        )

    list_sessions = submitting(list_sessions_async)

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        """Move a session, and what belongs to it, into a project."""
        await self._call(
            "assign_session_project",
            routes.SET_SESSION_PROJECT,
            bodies.SetProjectRequest(project_id=given_text(project_id, "project_id")),
            params={"session": given_text(session_id, "session_id")},
        )

    assign_session_project = submitting(assign_session_project_async)

    @on_loop
    async def export_session_trace_async(self, session_id: str) -> str:
        """A link to the session's trace, once the server has written it; an hour at most."""
        params = {"session": given_text(session_id, "session_id")}
        clock = self._connection.clock
        deadline = clock.now() + _EXPORT_DEADLINE_S
        while True:
            export = await self._call("export_session_trace", routes.EXPORT_TRACE, params=params)
            if export.status == "failed":
                reason = export.error or "the server gives no reason"
                raise ResultError(f"the trace could not be exported: {reason}")
            if export.status == "ready":
                if not export.url:
                    raise ResultError("the server says the trace is ready, but not where it is")
                return export.url
            if clock.now() + _EXPORT_POLL_S > deadline:
                raise ServerSilentError(
                    f"the trace is still not written after {_EXPORT_DEADLINE_S:.0f} s; ask again "
                    "later, the server continues to write it"
                )
            await clock.sleep(_EXPORT_POLL_S)

    export_session_trace = submitting(export_session_trace_async)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Experimental: a page of the sessions that match, newest first."""
        _experimental("search_sessions")
        return self._operations.start(lambda _: self._search(request))

    async def search_sessions_async(self, request: SessionSearchRequest) -> SessionSearchResponse:
        """As `search_sessions`, awaiting the page."""
        _experimental("search_sessions_async")
        return await self._search(request)

    async def _search(self, request: SessionSearchRequest) -> SessionSearchResponse:
        if not isinstance(request, SessionSearchRequest):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's value
            kind = type(request).__name__
            raise InputTypeError(f"must be a SessionSearchRequest, not {kind}", "request")
        return await self._call("search_sessions", routes.SEARCH_SESSIONS, request)

    # -- identity -----------------------------------------------------------------------------

    @on_loop
    async def whoami_async(self) -> WhoamiResponse:
        """Whose credential this is, as the token in use says; asks the server nothing more."""
        api = await self._connected()
        await api.auth.header_value()  # has a token fetched or refreshed where the server wants one
        if api.auth.token is None:
            raise ResultError(
                "the server does not say who owns a plain API key, because it exchanges no "
                "tokens; look the key up in the console"
            )
        claims = read_claims(api.auth.token)
        user, organisation = claims.get("sub"), claims.get("org_id")
        if not isinstance(user, str) or organisation is None:
            raise ResultError("the token in use does not say whom it belongs to")
        return WhoamiResponse(
            user_urn=user,
            org_urn=f"tml:organization:{organisation}",
            email=claims.get("email") or None,
        )

    whoami = submitting(whoami_async)

    # -- moved to AdminClient -----------------------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        """Deprecated: use `AdminClient.get_audit_log_async`."""
        return await self._admin("get_audit_log_async").get_audit_log_async(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        """Deprecated: use `AdminClient.get_billing_usage_async`."""
        admin = self._admin("get_billing_usage_async")
        return await admin.get_billing_usage_async(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage_async`."""
        admin = self._admin("get_current_checkpoint_storage_usage_async")
        return await admin.get_current_checkpoint_storage_usage_async(project_id)

    def _admin(self, method: str) -> AdminClient:
        message = f"RestClient.{method} is deprecated; use AdminClient.{method}"
        warnings.warn(message, FutureWarning, stacklevel=3)
        return AdminClient(self._lent)


def _experimental(method: str) -> None:
    message = f"RestClient.{method} is experimental and may change"
    warnings.warn(message, ExperimentalWarning, stacklevel=3)
