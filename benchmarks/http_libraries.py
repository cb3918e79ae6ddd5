"""What one HTTP call costs the client process, library by library.

A stub server in a process of its own answers every POST with the same bytes. Each library runs in a
fresh process, so that CPU time (all threads) and peak memory are its own. `httptools` is our own
`HttpTransport`, which uses only that parser. `floor` is not a library: it writes and reads the same
bytes with asyncio and nothing else, and shows what cannot be saved.

    PYTHONPATH=src python benchmarks/http_libraries.py [--requests 5000] [--in-flight 1000]
        [--rounds 5]

Prints a Markdown table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Post = Callable[[], Awaitable[int]]

BODY = json.dumps({"prompt": {"chunks": [{"tokens": list(range(200))}]}, "pad": "x" * 60}).encode()
REPLY_BODY = json.dumps({"request_id": "r" * 40, "sample_sequence_ids": ["s" * 30] * 28}).encode()
REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(REPLY_BODY)).encode()
    + b"\r\n\r\n"
    + REPLY_BODY
)
HEADERS = {
    "X-API-Key": "tml-benchmark",
    "Accept": "application/json",
    "Content-Type": "application/json",
    "User-Agent": "benchmark",
    "X-Idempotency-Key": "0" * 36,
}


class StubServer(asyncio.Protocol):
    """Counts complete requests by their length and answers each with the same bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            size = re.search(rb"(?i)content-length: *(\d+)", self.buffer[:end])
            total = end + 4 + (int(size.group(1)) if size else 0)
            if len(self.buffer) < total:
                return
            self.buffer = self.buffer[total:]
            self.transport.write(REPLY)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(
        StubServer, "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def aiohttp_client(url: str) -> AsyncIterator[Post]:
    import aiohttp

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    ) as session:

        async def post() -> int:
            async with session.post(url, data=BODY, headers=HEADERS) as reply:
                return len(await reply.read())

        yield post


@contextlib.asynccontextmanager
async def pyqwest_client(url: str) -> AsyncIterator[Post]:
    import pyqwest

    transport = pyqwest.HTTPTransport(pool_max_idle_per_host=1000, enable_otel=False)
    client = pyqwest.Client(transport)

    async def post() -> int:
        return len((await client.post(url, headers=HEADERS, content=BODY)).content)

    yield post


@contextlib.asynccontextmanager
async def httpx_client(url: str, library: str = "httpx") -> AsyncIterator[Post]:
    httpx = __import__(library)
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def post() -> int:
            return len((await client.post(url, content=BODY, headers=HEADERS)).content)

        yield post


@contextlib.asynccontextmanager
async def httptools_client(url: str) -> AsyncIterator[Post]:
    from tinkex.transport.base import HttpRequest, Pool
    from tinkex.transport.http import HttpTransport

    base_url, path = url.removesuffix("/api/v1/asample"), "/api/v1/asample"
    transport = HttpTransport(base_url)

    async def post() -> int:
        request = HttpRequest("POST", path, Pool.SAMPLE, 60.0, headers=HEADERS, body=BODY)
        return len((await transport.send(request)).body)

    yield post
    await transport.aclose()


@contextlib.asynccontextmanager
async def floor_client(url: str) -> AsyncIterator[Post]:
    """The least asyncio can do: one request per connection, a reply of known length."""
    host, port = url.split("/")[2].split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    request = (
        f"POST /api/v1/asample HTTP/1.1\r\nHost: {host}:{port}\r\n{head}"
        f"Content-Length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY
    idle: list[Connection] = []

    class Connection(asyncio.Protocol):
        def __init__(self) -> None:
            self.received = 0
            self.done: asyncio.Future[int] | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.received += len(data)
            if self.received >= len(REPLY) and self.done and not self.done.done():
                self.received = 0
                idle.append(self)
                self.done.set_result(len(REPLY_BODY))

    async def post() -> int:
        loop = asyncio.get_running_loop()
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(Connection, host, int(port))
        connection.done = loop.create_future()
        connection.transport.write(request)
        return await connection.done

    yield post


CLIENTS: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Post]]] = {
    "aiohttp": aiohttp_client,
    "pyqwest": pyqwest_client,
    "httpx": httpx_client,
    "httpx2": lambda url: httpx_client(url, "httpx2"),
    "httptools": httptools_client,
    "floor": floor_client,
}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(library: str, url: str, requests: int, in_flight: int) -> dict[str, float]:
    async with CLIENTS[library](url) as post:
        await asyncio.gather(*(post() for _ in range(50)))  # warm-up: imports, DNS, first sockets
        todo = iter(range(requests))

        async def worker() -> None:
            for _ in todo:
                if await post() != len(REPLY_BODY):
                    raise RuntimeError("a reply was cut short")

        cpu, wall = cpu_s(), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        cpu, wall = cpu_s() - cpu, time.perf_counter() - wall
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu_us": cpu / requests * 1e6, "wall_s": wall, "peak_mb": peak_kb / 1024}


def import_cpu_ms(library: str) -> float:
    """CPU time `import library` adds to a process that has asyncio and ssl already."""
    code = (
        "import asyncio, ssl, json, time; t = time.process_time();"
        f"import {library}; print(time.process_time() - t)"
    )
    return float(subprocess.check_output([sys.executable, "-c", code])) * 1000


def packages(library: str) -> int:
    """Installed packages the library brings, itself included, without extras."""
    seen: set[str] = set()
    todo = [library]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement, _, marker = line.partition(";")
            if "extra ==" in marker or not marker_holds(marker):
                continue
            found = re.match(r"[A-Za-z0-9._-]+", requirement)
            if found:
                todo.append(found.group())
    return len(seen)


def marker_holds(marker: str) -> bool:
    if not marker.strip():
        return True
    from packaging.markers import Marker

    return Marker(marker).evaluate()


def run(library: str, port: int, requests: int, in_flight: int) -> dict[str, float]:
    command = [
        sys.executable, __file__, "--child", library, "--port", str(port),
        "--requests", str(requests), "--in-flight", str(in_flight),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    # One library sometimes aborts when the interpreter ends; its numbers are out by then.
    return {**json.loads(done.stdout), "crashed": float(done.returncode != 0)}


def compare(requests: int, in_flight: int, rounds: int) -> None:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
        for _ in range(rounds):  # libraries take turns, so that a slow minute hits all of them
            for name in CLIENTS:
                samples[name].append(run(name, port, requests, in_flight))
    finally:
        server.terminate()
        server.wait()
    columns = "library|CPU µs/call (min-max)|wall s|peak MB|import CPU ms|packages|crashed"
    print("| " + columns.replace("|", " | ") + " |")
    print("|---|---|---|---|---|---|---|")
    results: dict[str, dict[str, float]] = {}
    for name, rows in samples.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        spread = f"{min(r['cpu_us'] for r in rows):.0f}-{max(r['cpu_us'] for r in rows):.0f}"
        if name != "floor":
            middle["import_ms"] = min(import_cpu_ms(name) for _ in range(3))
            middle["packages"] = packages(name)
        middle["crashed"] = sum(row["crashed"] for row in rows)
        results[name] = middle
        print(
            f"| {name} {version(name)} | {middle['cpu_us']:.0f} ({spread}) "
            f"| {middle['wall_s']:.2f} | {middle['peak_mb']:.0f} "
            f"| {middle.get('import_ms', 0):.0f} | {middle.get('packages', 0):.0f} "
            f"| {middle['crashed']:.0f} of {len(rows)} |"
        )
    print(
        json.dumps(
            {
                "python": platform.python_version(), "machine": platform.machine(),
                "cores": os.cpu_count(), "requests": requests, "in_flight": in_flight,
                "rounds": rounds, "results": results,
            }
        )
    )  # fmt: skip


def version(name: str) -> str:
    return "(asyncio only)" if name == "floor" else importlib.metadata.version(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())
    elif args.child:
        url = f"http://127.0.0.1:{args.port}/api/v1/asample"
        print(json.dumps(asyncio.run(measure(args.child, url, args.requests, args.in_flight))))
    else:
        compare(args.requests, args.in_flight, args.rounds)


if __name__ == "__main__":
    main()
