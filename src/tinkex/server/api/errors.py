"""Errors to HTTP replies. Nothing else in the server chooses an error status by itself.

A reply is `{"detail": …}` and always has a Content-Length: official clients take a 400
without one for a broken proxy. 409 is never sent, because they retry it for minutes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from tinkex.errors import (
    APIStatusError,
    InputError,
    RequestFailedError,
    ResponseInfo,
    status_error,
)

if TYPE_CHECKING:
    from starlette.requests import Request

_log = logging.getLogger(__name__)


def refuse(status: int, detail: str, *, headers: dict[str, str] | None = None) -> APIStatusError:
    """The error to raise for a request that is answered with `status`."""
    return status_error(ResponseInfo(status, headers or {}), {"detail": detail})


def error_reply(request: Request, error: Exception) -> Response:
    """The reply for whatever a handler raised."""
    if isinstance(error, APIStatusError):
        return _reply(error.status_code, error.body, error.response.headers)
    if isinstance(error, (InputError, RequestFailedError)):
        return _reply(400, {"detail": str(error)})
    # The handler ends here; the client learns that it is not its own fault, and no more.
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _reply(500, {"detail": "The server failed on this request; its log says why."})


def _reply(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers or {},
        media_type="application/json",
    )
