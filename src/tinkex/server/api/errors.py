"""Errors to HTTP replies. No other module of the server maps errors to a status.

A reply is `{"detail": …}` and always has a Content-Length: official clients treat a 400 without
one as a broken proxy. They retry 409 for minutes, so only `attach_model` sends it, which they never
call.
"""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.responses import Response

from tinkex.errors import (
    APIStatusError,
    ClosedError,
    EngineDiedError,
    InputError,
    RequestFailedError,
    ResponseInfo,
    StorageError,
    status_error,
)
from tinkex.server.observability.requests import request_record
from tinkex.server.scheduler.room import NoRoomError
from tinkex.server.store.ownership import ClaimLostError, LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

_log = logging.getLogger(__name__)

_SOON = {"retry-after": "1"}
FULL: Final[Mapping[str, str]] = {"retry-after": "30"}
"""The headers of a refusal because the tenant's quota is full."""
_NO_SPACE = (
    "The server cannot store this now: its disk is full, read-only or failing. Nothing was kept of "
    "this request. Its operator sees why; send it again later."
)
_AWAY = (
    "The server cannot reach its storage now. Whether this request was kept is not known; sending "
    "it again is safe."
)


def refuse(status: int, detail: str, *, headers: dict[str, str] | None = None) -> APIStatusError:
    """The error to raise for a request that is answered with `status`."""
    return status_error(ResponseInfo(status, headers or {}), {"detail": detail})


def error_reply(request: Request, error: Exception) -> Response:
    """The reply for whatever a handler raised."""
    _forget_locals(error)
    if isinstance(error, APIStatusError):
        return _reply(error.status_code, error.body, error.response.headers)
    if isinstance(error, InputError):
        return _reply(400, {"detail": str(error)})
    if isinstance(error, NoRoomError):
        return no_room_reply(error)
    if isinstance(error, RequestFailedError):
        return _reply(400 if error.category == "user" else 500, {"detail": str(error)})
    if isinstance(error, ClaimLostError | LeaseLostError):
        # The storage is well: the key was handed over while the request was on its way.
        detail = "Another node takes this over; send the request again in a moment."
        return _reply(503, {"detail": detail}, _SOON)
    if isinstance(error, StorageError):
        return _storage_reply(request, error)
    if isinstance(error, EngineDiedError):
        detail = "The engine is being started again; send the request again in a moment."
        return _reply(503, {"detail": detail}, _SOON)
    if isinstance(error, ClosedError):
        detail = "The server is being started again; send the request again in a moment."
        return _reply(503, {"detail": detail}, _SOON)
    return _surprise(request, error)


def no_room_reply(error: NoRoomError) -> Response:
    """A copy or an import that does not fit now: 429, as for other work, but not to be repeated.

    It is not a 400: the request is right and succeeds once something is deleted. But the caller
    is mostly the one that has to delete something, and a client that waits for it on its own hides
    what to delete. So clients are told to raise the error at once; those that ignore the header
    (the official one) give up after five minutes.
    """
    return _reply(429, {"detail": full_detail(error)}, {**FULL, "x-should-retry": "false"})


def full_detail(error: NoRoomError) -> str:
    """What the tenant is told: a sentence."""
    said = str(error)
    return f"{said[0].upper()}{said[1:]}."


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what a refused request sent.

    A future and the traceback of its exception refer to each other, and the frames hold the body,
    so that it would stay until the garbage collector runs. Only for errors made for one request:
    those of others may be in frames that still run.
    """
    while isinstance(error, APIStatusError | InputError):
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _storage_reply(request: Request, error: StorageError) -> Response:
    """A full or read-only disk stays so for a while; a database out of reach may be back soon.

    The operator's log and `/readyz` say what is wrong; the caller need not know where the server
    keeps its files.
    """
    record = request_record(request.scope)
    record.storage_error = storage_trouble(error)
    _log.error("the storage failed request_id=%s: %s", record.request_id, error)
    status, detail = (503, _AWAY) if _is_out_of_reach(error) else (507, _NO_SPACE)
    return _reply(status, {"detail": detail, "request_id": record.request_id}, _SOON)


def storage_trouble(error: StorageError) -> str:
    """What `/readyz` says about it, which anybody may read."""
    if _is_out_of_reach(error):
        return "it cannot be reached; the server's log says why"
    return "it cannot be written: the disk is full, read-only or failing; the server's log says why"


def _is_out_of_reach(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if isinstance(error, StorageError) and error.out_of_reach:
            return True
        error = error.__cause__
    return False


def _surprise(request: Request, error: Exception) -> Response:
    # The reply has no details: they may be secret. The path stays out of the log for the same
    # reason: download links are secrets.
    record = request_record(request.scope)
    _log.error("%s failed request_id=%s", record.route, record.request_id, exc_info=error)
    detail = (
        f"The server failed on this request; its log says why (request id {record.request_id})."
    )
    return _reply(500, {"detail": detail, "request_id": record.request_id})


def _reply(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers or {},
        media_type="application/json",
    )
