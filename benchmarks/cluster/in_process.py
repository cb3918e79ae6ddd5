"""Nodes of a cluster inside this process: a real app and a real store, and the fake engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__
from tinkex.clock import SystemClock
from tinkex.server.app import create_app, running
from tinkex.server.cluster.member import Joined
from tinkex.server.server_settings import ServerSettings
from tinkex.server.store.ownership import NODE_VERSION, Node
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.applications import Starlette

MODEL = "tinkex/tiny"
KEY = "tml-of-a-benchmark"
START_S = 60.0


class InProcessNode:
    """One node; requests are calls of its app."""

    def __init__(self, app: Starlette, store: SqlStore) -> None:
        self._app = app
        self._store = store

    async def write_all(self) -> None:
        """Write what is collected for a second or more."""
        await self._store._behind.flush()  # it has no other way

    async def post(self, name: str, body: object) -> Any:
        """The JSON reply to one request; raises what refused it."""
        sent = json.dumps(body).encode()
        path = f"/api/v1/{name}"
        messages: list[Any] = []
        waiting = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Any:
            return waiting.pop() if waiting else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "headers": [
                (b"host", b"localhost"),
                (b"x-api-key", KEY.encode()),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(sent)).encode()),
            ],
        }
        await self._app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in messages)
        if messages[0]["status"] != 200:
            raise RuntimeError(f"{name}: {messages[0]['status']} {content[:500]!r}")
        return json.loads(content)

    async def result(self, request_id: str) -> Any:
        """The result of an operation, waited for."""
        while True:
            found = await self.post("retrieve_future", {"request_id": request_id})
            if found.get("type") != "try_again":
                return found


class _NeverDue(SystemClock):
    """For the store alone: time stands still, so that counts are exact.

    Nothing is written later by itself, and no copy of a record becomes too old.
    """

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


def node_id(name: str) -> str:
    """How the database knows a node."""
    return f"{name}#1"


def described(name: str) -> Node:
    """A node that no other one can reach."""
    return Node(
        node_id=node_id(name),
        name=name,
        url="http://127.0.0.1:9",
        version=NODE_VERSION,
        release=__version__,
    )


def lost(reason: str) -> None:
    """A node was declared dead."""
    raise SystemExit(f"a node could not renew its lease in time: {reason}")


@asynccontextmanager
async def store_of_node(place: str, name: str, lease_s: float) -> AsyncGenerator[SqlStore]:
    """A store that has joined, and does nothing by itself."""
    async with SqlStore.open(place) as store:
        await store.join("benchmark", described(name), lease_s)
        yield store


@asynccontextmanager
async def node(place: str, name: str, lease_s: float) -> AsyncGenerator[InProcessNode]:
    """A whole node; what it collects to be written together waits for `write_all`."""
    async with SqlStore.open(place, clock=_NeverDue()) as store:
        membership = await store.join("benchmark", described(name), lease_s)
        joined = Joined(membership=membership, lease_s=lease_s, on_lost=lost)
        settings = ServerSettings(key_mode="single", secret=membership.secret)
        app = create_app(store, FakeEngine(), settings, joined=joined)
        async with running(app.state.parts):
            # Until the node has read that it serves its base model.
            async with asyncio.timeout(START_S):
                while not app.state.parts.member.roster.base_models:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
            yield InProcessNode(app, store)
