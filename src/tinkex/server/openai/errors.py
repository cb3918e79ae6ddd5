"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Which status an error of the server gets is decided in `server.api.errors`; here only what is
special to these endpoints, and the shape.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.responses import Response

from tinkex.errors import (
    APIStatusError,
    ClosedError,
    InputError,
    ResponseInfo,
    status_error,
)
from tinkex.server.api import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

_CODES: dict[int, str] = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}


def problem(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> APIStatusError:
    """The error to raise for a request that is answered with `status`."""
    body = error_body(status, message, param=param, code=code)
    return status_error(ResponseInfo(status, dict(headers or {})), body)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """What such a reply says."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    return {
        "error": {
            "message": message,
            "type": kind if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error",
            "param": param,
            "code": code or _CODES.get(status),
        }
    }


def error_reply(request: Request, error: Exception) -> Response:
    """The reply for whatever a handler raised."""
    status, headers, body = _described(request, error)
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def error_event(request: Request, error: Exception) -> dict[str, Any]:
    """The same for an answer that has begun: its status is out, so only the body is left."""
    return _described(request, error)[2]


def _described(request: Request, error: Exception) -> tuple[int, dict[str, str], dict[str, Any]]:
    if isinstance(error, APIStatusError) and "error" in _members(error.body):
        return error.status_code, error.response.headers, _members(error.body)
    if isinstance(error, ClosedError):
        text = "The server is ending; send the request again."
        return 503, {"retry-after": "1"}, error_body(503, text)
    param = error.path.rpartition(".")[2] or None if isinstance(error, InputError) else None
    reply = errors.error_reply(request, error)
    detail = str(_members(msgspec.json.decode(reply.body)).get("detail", ""))
    kept = {k: v for k, v in reply.headers.items() if k not in ("content-length", "content-type")}
    return reply.status_code, kept, error_body(reply.status_code, detail, param=param)


def _members(body: object) -> dict[str, Any]:
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}
