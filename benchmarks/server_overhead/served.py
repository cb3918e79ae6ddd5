"""The work through HTTP with our own client, and what a crowd does to the server."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

import tinkex
from benchmarks.server_overhead.work import LORA_RANK, MODEL, Size, batch, cpu_s, prompt
from tinkex.clock import SystemClock
from tinkex.transport.base import HttpRequest
from tinkex.transport.http import HttpTransport
from tinkex.types import AdamParams, SamplingParams
from tinkex.wire import routes
from tinkex.wire.json_codec import encode

if TYPE_CHECKING:
    from collections.abc import Generator

    from benchmarks.serving import Server
    from tinkex.wire.routes import Route

KEY = "tml-benchmark"
BEAT_EVERY_S = 10.0
LATE_S = 1.0


class Served:
    """One adapter and one sampler on the server."""

    def __init__(self, service: tinkex.ServiceClient, server: Server, size: Size) -> None:
        self._server, self._size = server, size
        self._training = service.create_lora_training_client(MODEL, rank=LORA_RANK)
        self._sampler = service.create_sampling_client(base_model=MODEL)

    def steps(self, count: int) -> tuple[list[float], float]:
        """Seconds of steps that follow one another, and the CPU of each outside the engine, ms."""
        data, params, taken = batch(), AdamParams(learning_rate=1e-4), list[float]()
        cpu = cpu_s() + self._server.cpu_s()
        for _ in range(count):
            start = time.perf_counter()
            passes = self._training.forward_backward(data, "cross_entropy")
            self._training.optim_step(params).result()
            passes.result()
            taken.append(time.perf_counter() - start)
        return taken, (cpu_s() + self._server.cpu_s() - cpu) / count * 1e3

    def waves(self, count: int) -> tuple[float, float, float]:
        """Seconds of a wave, and milliseconds of CPU of each sample: the server's, the caller's."""
        params = SamplingParams(max_tokens=self._size.new_tokens, stop=[])
        start, cpu, server_cpu = time.perf_counter(), cpu_s(), self._server.cpu_s()
        for _ in range(count):
            futures = [
                self._sampler.sample(prompt(n), 1, params) for n in range(self._size.at_once)
            ]
            for future in futures:
                future.result()
        samples = count * self._size.at_once
        return (
            (time.perf_counter() - start) / count,
            (self._server.cpu_s() - server_cpu) / samples * 1e3,
            (cpu_s() - cpu) / samples * 1e3,
        )


@contextmanager
def opened(server: Server, size: Size) -> Generator[Served]:
    """A client of the server, until the end of the block."""
    with tinkex.ServiceClient(base_url=server.url, api_key=KEY) as service:
        yield Served(service, server, size)


def memory(server: Server, size: Size) -> float:
    """Resident MiB of the API process after many finished futures."""
    with tinkex.ServiceClient(base_url=server.url, api_key=KEY) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = SamplingParams(max_tokens=size.new_tokens, stop=[])
        for first in range(0, size.finished, 1000):
            futures = [sampler.sample(prompt(first + n), 1, params) for n in range(1000)]
            for future in futures:
                future.result()
        return server.resident_mib()


async def crowd(server: Server, size: Size) -> dict[str, float]:
    """Samples always in flight beside many sessions that must be heard in time."""
    samples = asyncio.create_task(asyncio.to_thread(_keep_sampling, server, size))
    transport = HttpTransport(server.url, SystemClock())
    try:
        sessions = [await _open(transport) for _ in range(size.crowd_sessions)]
        beats = [_beats(transport, s, i, size) for i, s in enumerate(sessions)]
        delays = [delay for found in await asyncio.gather(*beats) for delay in found]
    finally:
        await transport.aclose()
    done, errors = await samples
    return {
        "samples": done,
        "errors": errors + delays.count(float("inf")),
        "heartbeats": len(delays),
        "late": sum(delay > LATE_S for delay in delays),
        "slowest_s": max(delays),
    }


def _keep_sampling(server: Server, size: Size) -> tuple[int, int]:
    """Keep so many samples in flight until the time is over; how many ended, how many badly."""
    done = errors = 0
    with tinkex.ServiceClient(base_url=server.url, api_key=KEY) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = SamplingParams(max_tokens=size.new_tokens, stop=[])
        end = time.perf_counter() + size.crowd_s
        waiting = [sampler.sample(prompt(n), 1, params) for n in range(size.crowd_samples)]
        while waiting:
            future = waiting.pop(0)
            try:
                future.result()
                done += 1
            except Exception:  # noqa: BLE001 - counted; the figure must be zero
                errors += 1
            if time.perf_counter() < end:
                waiting.append(sampler.sample(prompt(done), 1, params))
    return done, errors


async def _open(transport: HttpTransport) -> str:
    body = encode({"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})
    reply = await transport.send(_request(routes.CREATE_SESSION, body))
    return msgspec.json.decode(reply.body)["session_id"]


async def _beats(transport: HttpTransport, session: str, index: int, size: Size) -> list[float]:
    """Seconds each heartbeat took; infinity for one that failed."""
    body = encode({"session_id": session})
    start = time.perf_counter() + BEAT_EVERY_S * index / size.crowd_sessions
    delays: list[float] = []
    for number in range(int(size.crowd_s // BEAT_EVERY_S)):
        due = start + number * BEAT_EVERY_S
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        reply = await transport.send(_request(routes.SESSION_HEARTBEAT, body))
        delays.append(time.perf_counter() - due if reply.status == 200 else float("inf"))
    return delays


def _request(route: Route[Any, Any], body: bytes) -> HttpRequest:
    headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
    return HttpRequest("POST", route.path, route.pool, timeout_s=10.0, headers=headers, body=body)
