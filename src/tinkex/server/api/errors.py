"""Errors to HTTP replies. No other module of the server maps errors to a status.

A reply is `{"detail": …}` and always has a Content-Length: official clients treat a 400 without
one as a broken proxy. They retry 409 for minutes, so only `attach_model` sends it, which they never
call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from tinkex.errors import (
    APIStatusError,
    EngineDiedError,
    InputError,
    RequestFailedError,
    ResponseInfo,
    StorageError,
    status_error,
)
from tinkex.server.observability.requests import request_record

if TYPE_CHECKING:
    from starlette.requests import Request

_log = logging.getLogger(__name__)

_SOON = {"retry-after": "1"}


def refuse(status: int, detail: str, *, headers: dict[str, str] | None = None) -> APIStatusError:
    """The error to raise for a request that is answered with `status`."""
    return status_error(ResponseInfo(status, headers or {}), {"detail": detail})


def error_reply(request: Request, error: Exception) -> Response:
    """The reply for whatever a handler raised."""
    if isinstance(error, APIStatusError):
        return _reply(error.status_code, error.body, error.response.headers)
    if isinstance(error, InputError):
        return _reply(400, {"detail": str(error)})
    if isinstance(error, RequestFailedError):
        return _reply(400 if error.category == "user" else 500, {"detail": str(error)})
    if isinstance(error, StorageError):
        return _storage_reply(request, error)
    if isinstance(error, EngineDiedError):
        detail = "The engine is being started again; send the request again in a moment."
        return _reply(503, {"detail": detail}, _SOON)
    return _surprise(request, error)


def _storage_reply(request: Request, error: StorageError) -> Response:
    """A full or read-only disk stays so for a while; a database out of reach may be back soon."""
    request_record(request.scope).storage_error = str(error)
    _log.error("the storage failed: %s", error)
    status = 503 if _is_out_of_reach(error) else 507
    return _reply(status, {"detail": str(error)}, _SOON)


def _is_out_of_reach(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
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
