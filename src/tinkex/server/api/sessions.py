"""Sessions: create, keep alive, finish, list, describe, search, export a trace."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from tinkex.server.api.audit import note
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.store.records import StoredSession
from tinkex.types import (
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    CreateSessionRequest,
    CreateSessionResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
    UserSearchOwner,
)
from tinkex.types.bounds import METADATA_BYTES, PAGE_OFFSET
from tinkex.wire import routes
from tinkex.wire.bodies import FinishSessionRequest, SetProjectRequest, TraceExportResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.types import SessionStatusQuery

# A search reads at most so many sessions and then returns what it has found and a cursor.
_MOST_SEARCHED = 2_000
_PART = 200
_ROUNDED_S = 1e-5


def as_strings(metadata: Mapping[str, object] | None) -> dict[str, str]:
    """Metadata as listings return it: values that are no strings become JSON.

    Raises a 400 for more than the server keeps.
    """
    plain = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (metadata or {}).items()
    }
    size = len(msgspec.json.encode(plain))
    if size > METADATA_BYTES:
        raise refuse(
            400,
            f"user_metadata has {size} bytes as JSON; it may have {METADATA_BYTES}. Keep large "
            "things elsewhere, and their address here.",
        )
    return plain


def when(at: float) -> datetime:
    """A stored time with its zone."""
    return datetime.fromtimestamp(at, UTC)


async def create_session(call: Call) -> Response:
    """Open a session; the reply has the messages of the settings for new sessions."""
    request = await call.json(CreateSessionRequest)
    session = await open_session(
        call,
        sdk_version=request.sdk_version,
        tags=tuple(request.tags),
        user_metadata=as_strings(request.user_metadata),
        project_id=request.project_id,
        display_name=request.display_name,
    )
    messages = call.settings.session_messages
    return reply(
        CreateSessionResponse(
            session_id=session.session_id,
            info_message=messages.get("info"),
            warning_message=messages.get("warning"),
            error_message=messages.get("error"),
        )
    )


async def open_session(
    call: Call,
    *,
    sdk_version: str = "",
    tags: tuple[str, ...] = (),
    user_metadata: Mapping[str, str] | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
    heartbeats: bool = True,
) -> StoredSession:
    """Store a new session of the caller."""
    now = call.now()
    session = StoredSession(
        session_id=call.parts.new_id(),
        owner=call.owner,
        created_at=now,
        last_seen_at=now,
        sdk_version=sdk_version,
        tags=tags,
        user_metadata=user_metadata or {},
        project_id=call.access.project(project_id),
        display_name=display_name,
        heartbeats=heartbeats,
    )
    await call.parts.limits.add_session(session)
    return session


async def session_heartbeat(call: Call) -> Response:
    """Note a heartbeat; 410 if the session is over."""
    request = await call.json(SessionHeartbeatRequest)
    session = await call.session(request.session_id)
    # Checked only after the write: a session that ends meanwhile stays over.
    touched = await call.store.touch_session(session.session_id, call.now())
    if touched is None or not touched.active:
        raise refuse(410, f"Session {session.session_id!r} is over.")
    return reply(SessionHeartbeatResponse())


async def finish_session(call: Call) -> Response:
    """End a session; the first reason wins, a second finish changes nothing."""
    request = await call.json(FinishSessionRequest)
    session = await call.session(call.param("session"))
    status = ClientSessionFinished(reason=request.reason, detail=request.detail)
    await call.worker.end_session(session, status)
    if session.active:
        await note(call, "sessions", "session_finished", session_id=session.session_id)
    return reply()


async def set_session_project(call: Call) -> Response:
    """Move a session and its runs into a project."""
    request = await call.json(SetProjectRequest)
    if not request.project_id:
        raise refuse(400, "project_id is empty; name the project.")
    session = await call.session(call.param("session"))
    call.access.project(request.project_id)
    store, project_id = call.store, request.project_id
    await store.change_session(session.session_id, project_id=project_id)
    for model in await store.models(session_id=session.session_id):
        await store.change_model(model.model_id, project_id=project_id)
    details = {"session_id": session.session_id, "project_id": project_id}
    await note(call, "projects", "session_moved", **details)
    return reply()


async def list_sessions(call: Call) -> Response:
    """Ids, newest first."""
    offset, limit = call.number("offset", 0, most=PAGE_OFFSET), call.number("limit", 20)
    ids = await call.store.session_ids(call.owner, offset, limit, project_id=call.access.project_id)
    return reply(ListSessionsResponse(sessions=list(ids)))


async def get_session(call: Call) -> Response:
    """The runs and samplers of a session."""
    session = await call.session(call.param("session"))
    runs, samplers = await call.store.ids_of_session(session.session_id)
    return reply(
        GetSessionResponse(
            training_run_ids=list(runs),
            sampler_ids=list(samplers),
            user_metadata=dict(session.user_metadata),
            display_name=session.display_name,
        )
    )


async def export_trace(call: Call) -> Response:
    """A trace is made when it is downloaded, so it is always ready."""
    session = await call.session(call.param("session"))
    token, _ = call.parts.identity.make_link(
        {"kind": "trace", "session": session.session_id}, call.access.key_id
    )
    url = call.link(f"{routes.PREFIX}/files/{token}/trace.json")
    return reply(TraceExportResponse(status="ready", url=url))


async def search_sessions(call: Call) -> Response:
    """One page of the caller's sessions that match, newest first."""
    request = await call.json(SessionSearchRequest)
    owner = request.owner
    if isinstance(owner, UserSearchOwner) and call.owner not in owner.owner_urns:
        return reply(SessionSearchResponse(sessions=[]))
    page: list[StoredSession] = []
    last, seen = None, 0
    async for session in _sessions_after(call, request.cursor):
        if len(page) == request.limit or seen == _MOST_SEARCHED:
            break
        last, seen = session, seen + 1
        if _matches(session, request):
            page.append(session)
    else:
        last = None  # there are no more
    cursor = None
    if last is not None:
        cursor = SessionSearchCursor(
            last_created_at=when(last.created_at), last_session_id=last.session_id
        )
    summaries = [await _summary(call, session) for session in page]
    return reply(SessionSearchResponse(sessions=summaries, next_cursor=cursor))


async def _sessions_after(
    call: Call, cursor: SessionSearchCursor | None
) -> AsyncGenerator[StoredSession]:
    """The caller's sessions after a cursor, newest first, a few at a time from the store."""
    last = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
    # A cursor's time is rounded; the comparison below is exact.
    before = None if cursor is None else cursor.last_created_at.timestamp() + _ROUNDED_S
    known: set[str] = set()
    while True:
        part = await call.store.sessions(
            call.owner,
            before=before,
            limit=len(known) + _PART,
            project_id=call.access.project_id,
        )
        new = [s for s in part if s.session_id not in known]
        for session in new:
            if last is None or (when(session.created_at), session.session_id) < last:
                yield session
        if len(new) < _PART:
            return
        before = new[-1].created_at
        known = {s.session_id for s in part if s.created_at == before}


def _matches(session: StoredSession, request: SessionSearchRequest) -> bool:
    names = [request.session_id is not None, request.display_name is not None]
    by_name = session.session_id == request.session_id or (
        request.display_name is not None
        and all(
            word in (session.display_name or "").lower()
            for word in request.display_name.lower().split()
        )
    )
    return (
        (by_name or not any(names))
        and (request.project_ids is None or session.project_id in request.project_ids)
        and all(session.user_metadata.get(k) == v for k, v in request.user_metadata.items())
        and (request.statuses is None or any(_in_status(session, q) for q in request.statuses))
    )


def _in_status(session: StoredSession, query: SessionStatusQuery) -> bool:
    if session.status.type != query.type:
        return False
    if isinstance(query, ClientFinishedSessionStatusQuery) and query.reasons is not None:
        status = session.status
        return isinstance(status, ClientSessionFinished) and status.reason.type in query.reasons
    return True


async def _summary(call: Call, session: StoredSession) -> SessionSummary:
    saved, size_bytes = await call.store.saved_by_session(session.session_id)
    return SessionSummary(
        session_id=session.session_id,
        created_at=when(session.created_at),
        owner=session.owner,
        project_id=session.project_id or "default",
        status=session.status,
        checkpoints_count=saved,
        display_name=session.display_name,
        user_metadata=dict(session.user_metadata),
        checkpoint_storage_bytes=size_bytes,
    )
