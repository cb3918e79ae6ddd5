"""The least that a durable server does: a Starlette route that stores one row and answers.

    python -m benchmarks.server_overhead.bare DATABASE

It runs on uvicorn with the settings of `tinkex serve`, and its SQLite file lies on the same disk in
the same journal mode; every row is on the disk before it is acknowledged. What the server adds to
its engine is judged as a multiple of one such call, measured in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.server_overhead.work import cpu_s
from benchmarks.serving import ROOT, START_S, Server
from tinkex.clock import SystemClock
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import HttpTransport

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from starlette.requests import Request as Asked

PATH = "/rows"
# As the store of the server: the log is written ahead, and a commit waits for the disk.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000")


def app(database: str) -> Starlette:
    """One route: a row in, its number out."""
    connection = sqlite3.connect(database, isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    async def store(request: Asked) -> Response:
        body = await request.body()
        row = connection.execute("INSERT INTO rows (body) VALUES (?)", (body,)).lastrowid
        return Response(json.dumps({"row": row}), media_type="application/json")

    return Starlette(routes=[Route(PATH, store, methods=["POST"])])


def serve(database: str) -> None:
    """Answer until terminated; prints the address when ready."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"bare route on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app(database), ws="none", log_config=None, access_log=False)
    uvicorn.Server(config).run([listener])


@contextmanager
def serving(folder: Path) -> Generator[Server]:
    """The bare server in a process of its own, until the end of the block."""
    argv = [sys.executable, "-m", "benchmarks.server_overhead.bare", str(folder / "bare.sqlite")]
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    with process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            found = re.search(r"on (http://\S+)", process.stdout.readline() if ready else "")
            if found is None:
                raise SystemExit("the bare server did not start")
            yield Server(found[1], process.pid)
        finally:
            process.terminate()


class Bare:
    """Calls of the bare route, one after another and many at once."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def in_turn(self, body: bytes, count: int) -> tuple[list[float], float]:
        """Seconds of calls that follow one another, and CPU of each, caller and server, ms."""
        before = cpu_s() + self._server.cpu_s()
        taken = asyncio.run(self._in_turn(body, count))
        return taken, (cpu_s() + self._server.cpu_s() - before) / count * 1e3

    def at_once(self, body: bytes, count: int, at_once: int) -> float:
        """CPU of each call, caller and server, in milliseconds, with so many of them open."""
        before = cpu_s() + self._server.cpu_s()
        asyncio.run(self._waves(body, count, at_once))
        return (cpu_s() + self._server.cpu_s() - before) / count * 1e3

    async def _in_turn(self, body: bytes, count: int) -> list[float]:
        transport, taken = HttpTransport(self._server.url, SystemClock()), list[float]()
        try:
            await transport.send(_request(body))  # opens the connection
            for _ in range(count):
                start = time.perf_counter()
                await transport.send(_request(body))
                taken.append(time.perf_counter() - start)
        finally:
            await transport.aclose()
        return taken

    async def _waves(self, body: bytes, count: int, at_once: int) -> None:
        transport = HttpTransport(self._server.url, SystemClock())
        try:
            for _ in range(count // at_once):
                calls: list[Any] = [transport.send(_request(body)) for _ in range(at_once)]
                await asyncio.gather(*calls)
        finally:
            await transport.aclose()


def _request(body: bytes) -> HttpRequest:
    headers = {"Content-Type": "application/json"}
    return HttpRequest("POST", PATH, Pool.SAMPLE, timeout_s=30.0, headers=headers, body=body)


if __name__ == "__main__":
    serve(sys.argv[1])
