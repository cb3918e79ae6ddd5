"""One short life of a server on a given store, in a process of its own; prints what it cost."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tinkex.clock import SystemClock
from tinkex.server import Settings
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeServer
from tinkex.transport.base import HttpRequest, Pool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MODEL = "tinkex/tiny"
KEY = "tml-history"
_TIMES = 30
_FINISHED = {"reason": {"type": "success"}, "detail": None}


class Client:
    """Raw requests to a server in this process."""

    def __init__(self, server: FakeServer) -> None:
        self._transport = server.transport()

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One request that must succeed, and its answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"x-api-key": KEY, "accept": "application/json"}
        reply = await self._transport.send(
            HttpRequest(method, path, Pool.REST, 60, "", headers, data)
        )
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {reply.body[:200]!r}")
        return None if path == "/metrics" else json.loads(reply.body)

    async def result(self, path: str, body: object) -> Any:
        """What an operation comes to."""
        future = await self.call("POST", path, body)
        while True:
            found = await self.call("POST", "/api/v1/retrieve_future", future)
            if found.get("type") != "try_again":
                return found

    async def session(self) -> str:
        """A new session with a model, a sampler and a checkpoint."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        session = (await self.call("POST", "/api/v1/create_session", body))["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        await self.result("/api/v1/create_model", {**model, "lora_config": {"rank": 8}})
        run = f"{session}:train:0"
        sampler = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
        await self.result("/api/v1/save_weights_for_sampler", sampler)
        await self.result("/api/v1/save_weights", {"model_id": run, "seq_id": 2, "path": "one"})
        return session


async def live(path: str) -> dict[str, float]:
    """Milliseconds of a start and of some requests, and the memory at the end in MiB."""
    before = perf_counter()
    async with SqlStore.open(path) as store:
        sql: Any = store
        async with FakeServer(store=sql, settings=Settings(), clock=SystemClock()) as server:
            client = Client(server)
            await client.session()
            found = {"start": 1e3 * (perf_counter() - before)}
            for name, prepare, run in _requests(client):
                found[name] = await _time(prepare, run)
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


async def _time(
    prepare: Callable[[], Awaitable[Any]], run: Callable[[Any], Awaitable[Any]]
) -> float:
    times: list[float] = []
    for _ in range(_TIMES):
        prepared = await prepare()
        before = perf_counter()
        await run(prepared)
        times.append(1e3 * (perf_counter() - before))
    return median(times)


def _requests(client: Client) -> list[tuple[str, Any, Any]]:
    async def nothing() -> None:
        return None

    def get(path: str) -> Any:
        return lambda _: client.call("GET", path)

    def end(session: str) -> Any:
        return client.call("POST", f"/api/v1/sessions/{session}/finish", _FINISHED)

    def delete(session: str) -> Any:
        run = f"/api/v1/training_runs/{session}:train:0"
        return client.call("DELETE", f"{run}/checkpoints/weights/one")

    return [
        ("/metrics", nothing, get("/metrics")),
        ("create session and model", nothing, lambda _: client.session()),
        ("end session", client.session, end),
        ("delete checkpoint", client.session, delete),
        ("list sessions", nothing, get("/api/v1/sessions")),
        ("list runs", nothing, get("/api/v1/training_runs")),
        ("list checkpoints", nothing, get("/api/v1/checkpoints")),
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(live(sys.argv[1]))))
