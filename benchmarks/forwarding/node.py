"""A node for the measurement: `python -m benchmarks.forwarding.node [URL OF THE OWNER]`.

It has the server, the middleware and the reading of bodies that `tinkex serve` has. Requests below
`/here` are answered with fixed bytes; those below `/there` are passed on to the owner, which
answers them in the same way.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serving import ROOT, Server, ready_url
from tinkex.clock import SystemClock
from tinkex.server import Settings
from tinkex.server.api.call import Uploads, read_body
from tinkex.server.api.errors import error_reply
from tinkex.server.cluster.forwarding import Forwarder
from tinkex.server.cluster.hop import Hops
from tinkex.server.cluster.peers import Peers
from tinkex.server.observability.meters import Meters, Readiness
from tinkex.server.observability.requests import Polls, RequestObserver, request_record
from tinkex.server.store.ownership import Node
from tinkex.serving.connections import ConnectionLimits
from tinkex.serving.http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Generator

    from starlette.types import ASGIApp, Receive, Scope, Send

HOLD_S = 0.25
"""How long the owner holds a poll."""
_REPLIES = {
    "small": b'{"status": "ok"}',
    "sample": b'{"request_id": "' + b"x" * 60 + b'", "sequence_ids": ["' + b"y" * 60 + b'"]}',
    "train": b'{"request_id": "' + b"x" * 60 + b'"}',
    "poll": b"\0" * 1100,  # 128 tokens with their log-probabilities
}
_ROUTES = {"train": "forward_backward", "sample": "asample"}


class App:
    """Both kinds of requests."""

    def __init__(self, owner: str | None) -> None:
        clock = SystemClock()
        self._settings = Settings()
        self._uploads = Uploads(clock, 60.0)
        hops = Hops(b"secret", "gateway-1", clock.wall)
        peers = Peers(clock, long_poll_s=self._settings.long_poll_s)
        self._hops, self._forwarder = hops, Forwarder(peers, hops)
        self._owner = Node(node_id="owner-1", name="owner", url=owner or "", version=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        _, where, kind = scope["path"].split("/")
        request_record(scope).route = _ROUTES.get(kind, kind)
        self._hops.admit(scope)
        if scope["method"] == "POST":
            await read_body(request, self._settings, self._uploads)
        response = await self._answer(request, where, kind)
        await response(scope, receive, send)

    async def _answer(self, request: Request, where: str, kind: str) -> Response:
        if where == "there" and self._owner.url:
            return await self._forwarder.forward(request, self._owner)
        if kind == "poll":
            await asyncio.sleep(HOLD_S)
        return Response(_REPLIES[kind], media_type="application/json")


def observed(app: ASGIApp) -> ASGIApp:
    """As in `create_app`; and the start of the server."""
    observer = RequestObserver(
        app,
        clock=SystemClock(),
        settings=Settings(),
        meters=Meters(),
        readiness=Readiness(),
        polls=Polls(),
        error_reply=error_reply,
    )

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return
        await observer(scope, receive, send)

    return outer


def serve(owner: str | None) -> None:
    """Answer until terminated; prints the address when ready."""
    import uvloop

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = HttpServer(observed(App(owner)), ConnectionLimits(connections=900, per_address=900))
    print(f"node on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvloop.run(server.serve(listener))


@contextmanager
def serving(owner: str | None = None) -> Generator[Server]:
    """A node in a process of its own, until the end of the block."""
    import subprocess

    argv = [sys.executable, "-m", "benchmarks.forwarding.node", *([owner] if owner else [])]
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    env = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    with process:
        try:
            yield Server(ready_url(process), process.pid)
        finally:
            process.terminate()


if __name__ == "__main__":
    serve(sys.argv[1] if len(sys.argv) > 1 else None)
