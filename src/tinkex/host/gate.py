"""Answers for a server that cannot work yet, or does not any more.

Until the first engine is ready nobody knows which models there are, so requests wait a while and
are then asked to come back. What operators ask (`/healthz` and the like) is always let through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tinkex.clock import time_limit
from tinkex.errors import TinkerError
from tinkex.host.engine import first_line

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tinkex.clock import Clock
    from tinkex.host.engine import RestartingEngine

_OPEN: Final = ("/healthz", "/readyz", "/metrics")
_PATIENCE_S: Final = 20.0
_RETRY_AFTER_S: Final = 1


class Gate:
    """An ASGI app around the server's."""

    def __init__(self, app: ASGIApp, engine: RestartingEngine, clock: Clock) -> None:
        self._app = app
        self._engine = engine
        self._clock = clock
        # Mutable state: whether it lets anybody in.
        self._draining = False

    def close(self) -> None:
        """Let nobody in from now on; who is in may finish."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or tell it why not."""
        if scope["type"] == "http" and not str(scope["path"]).endswith(_OPEN):
            if self._engine.generation == 0:
                await self._wait()
            if self._draining or self._engine.generation == 0:
                await _refuse(send, self._reason())
                return
        await self._app(scope, receive, send)

    async def _wait(self) -> None:
        async with time_limit(self._clock, _PATIENCE_S):
            try:
                await self._engine.wait_ready()
            except TinkerError:
                return  # the answer says why

    def _reason(self) -> str:
        if self._draining:
            return "The server is shutting down; what it accepted is kept. Try again."
        problem = self._engine.problem
        if problem is not None:
            return f"The engine cannot be started: {first_line(problem)}"
        return f"The server is starting: {self._engine.phase}. Try again."


async def _refuse(send: Send, reason: str) -> None:
    body = msgspec.json.encode({"detail": reason, "error": reason})
    headers: list[tuple[bytes, Any]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(_RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
