"""The short way to a handler for the paths that have no parameters, which is most requests.

The router tries its routes one by one, and every layer around it costs more than many a handler.
What is not known here takes the usual way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    # Answers everything that goes wrong in it by itself.
    Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """An ASGI app before the router: `endpoints` by method and path."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Below a prefix, the path is not only ours.
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                response = await endpoint(Request(scope, receive, send))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
