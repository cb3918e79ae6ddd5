"""The body as it was received: the same bytes, for as long as the request is answered."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tinkex.clock import SystemClock
from tinkex.server import Settings
from tinkex.server.api.call import Uploads, read_body
from tinkex.server.api.errors import error_reply
from tinkex.server.observability.meters import Meters, Readiness
from tinkex.server.observability.requests import Polls, RequestObserver, sent_body
from tinkex.wire.compression import compress

pytestmark = pytest.mark.anyio


def scope_of(body: bytes, encoding: str) -> dict[str, Any]:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-encoding", encoding.encode())]
    return {"type": "http", "method": "POST", "path": "/x", "query_string": b"", "headers": headers}


def receiving(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
async def test_a_body_is_kept_as_it_came_and_dropped_with_the_answer(encoding: str):
    body = compress(b"x" * 5000) if encoding == "zstd" else b"x" * 5000
    seen: list[bytes | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        assert sent_body(scope) is None
        read = await read_body(request, Settings(), Uploads(SystemClock(), 60.0))
        assert read == b"x" * 5000
        kept = sent_body(scope)
        assert kept == body
        assert (kept is read) == (encoding == "identity")  # no copy
        seen.append(kept)
        await Response()(scope, receive, send)
        assert sent_body(scope) is kept

    async def send(message: Any) -> None: ...

    observer = RequestObserver(
        app,
        clock=SystemClock(),
        settings=Settings(),
        meters=Meters(),
        readiness=Readiness(),
        polls=Polls(),
        error_reply=error_reply,
    )
    scope = scope_of(body, encoding)
    await observer(scope, receiving(body), send)
    assert seen == [body]
    assert sent_body(scope) is None
    assert not any(value is seen[0] for value in scope.values())
