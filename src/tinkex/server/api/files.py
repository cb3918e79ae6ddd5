"""Downloads behind signed links, which need no key: exports, archives, traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from tinkex.server.api.downloads import send_export
from tinkex.server.api.trace import trace

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinkex.server.api.call import Parts


async def download(parts: Parts, request: Request, token: str, name: str) -> Response:
    """What a signed link stands for."""
    claims = parts.identity.open_link(token)
    if claims["kind"] == "trace":
        return await _trace(parts, claims["session"])
    return await send_export(parts, request, claims, name)


async def _trace(parts: Parts, session_id: str) -> Response:
    operations = await parts.store.operations(session_id)
    body = trace(operations, parts.polls.of(session_id))
    return Response(body, media_type="application/json")
