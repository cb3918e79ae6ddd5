"""The short way to a handler, and who has to take the long one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import PlainTextResponse

from tinkex.server.app import Direct

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


async def _short(request: Request) -> PlainTextResponse:
    return PlainTextResponse("short")


async def _long(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("long")(scope, receive, send)


async def answer(method: str, path: str, **scope: Any) -> bytes:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads the body")

    app = Direct(_long, {("POST", "/api/v1/asample"): _short})
    await app({"type": "http", "method": method, "path": path, **scope}, receive, send)
    return sent[1]["body"]


async def test_a_known_path_takes_the_short_way() -> None:
    assert await answer("POST", "/api/v1/asample") == b"short"


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/api/v1/asample", {}),
        ("POST", "/api/v1/asample/", {}),
        ("POST", "/api/v1/models/m1", {}),
        ("POST", "/api/v1/asample", {"root_path": "/api"}),
    ],
    ids=["other method", "slash too many", "parameter", "below a prefix"],
)
async def test_everything_else_is_left_to_the_router(
    method: str, path: str, scope: dict[str, str]
) -> None:
    assert await answer(method, path, **scope) == b"long"


async def test_a_wrong_method_on_a_known_path_is_answered_in_our_form(api: Any) -> None:
    reply = await api.call("PUT", "/asample", {})
    assert reply.status == 405
    assert b"is not part of this API" in reply.body
