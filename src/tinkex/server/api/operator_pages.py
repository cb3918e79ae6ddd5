"""The pages for operators: health, readiness, metrics, OpenAPI.

Only the metrics need a key, on a server with keys: they cover all of its tenants.
"""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.routing import Route

from tinkex.clock import time_limit
from tinkex.errors import StorageError, TinkerError
from tinkex.server.api.errors import error_reply, storage_trouble
from tinkex.server.api.identity import credential_of
from tinkex.server.observability.requests import request_record
from tinkex.server.openapi import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from tinkex.server.api.call import Parts

T = TypeVar("T")

_PROBE_S = 2.0
_PATIENCE_S = 1.0
# A full disk may still take a few bytes.
_PROBE_BYTES = 256 << 10

_log = logging.getLogger(__name__)


def routes(parts: Parts) -> list[Route]:
    """Mounted beside the protocol's own."""
    pages: dict[str, Callable[[Parts], Awaitable[Response]]] = {
        "healthz": _healthz,
        "readyz": _readyz,
        "metrics": _metrics,
        "openapi.json": _openapi,
    }
    return [_route(parts, name, page) for name, page in pages.items()]


def _route(parts: Parts, name: str, page: Callable[[Parts], Awaitable[Response]]) -> Route:
    async def endpoint(request: Request) -> Response:
        request_record(request.scope).route = name
        try:
            if page is _metrics:
                await _check_key(parts, request)
            return await page(parts)
        except TinkerError as error:
            return error_reply(request, error)

    return Route(f"/{name}", endpoint, methods=["GET"], name=name)


async def _healthz(parts: Parts) -> Response:
    """The process answers."""
    return _json({"status": "ok"})


async def _readyz(parts: Parts) -> Response:
    """Whether what is accepted now will also be done, and what it would wait for."""
    await _try_store(parts)
    await _look_at_disk(parts)
    reasons = parts.readiness.reasons
    if not reasons:
        return _json({"status": "ready"})
    detail = "; ".join(f"{part}: {reason}" for part, reason in reasons.items())
    return _json({"status": "not ready", "detail": detail, "reasons": reasons}, status=503)


async def _try_store(parts: Parts) -> None:
    """Read, and where writing has failed before write again, within a short time."""
    failing = "store" in parts.readiness.reasons
    try:
        async with time_limit(parts.clock, _PROBE_S) as limit:
            await parts.store.recall("readyz", "probe")
            if failing:
                await parts.store.probe(_PROBE_BYTES)
    except StorageError as error:
        _log.warning("the store is not ready: %s", error)
        parts.readiness.waits("store", storage_trouble(error))
        return
    except TinkerError as error:
        parts.readiness.waits("store", str(error))
        return
    if limit.expired:
        parts.readiness.waits("store", f"it has not answered for {_PROBE_S:g} s")
    elif failing:
        parts.readiness.ready("store")


async def _look_at_disk(parts: Parts) -> None:
    """Say that a disk is nearly full before requests fail."""
    folder, least = parts.settings.watched_folder, parts.settings.min_free_bytes
    if folder is None:
        return
    try:
        free = (await anyio.to_thread.run_sync(shutil.disk_usage, folder)).free
    except OSError as error:
        parts.readiness.waits("disk", f"it cannot be read: {error.strerror}")
        return
    if free < least:
        parts.readiness.waits(
            "disk", f"{free} bytes are free, fewer than {least} (min_free_bytes); free some space"
        )
    else:
        parts.readiness.ready("disk")


async def _check_key(parts: Parts, request: Request) -> None:
    if parts.settings.key_mode in ("fixed", "stored"):
        address = "" if request.client is None else request.client.host
        caller = await parts.identity.caller(credential_of(request.headers), address)
        parts.identity.check(caller, "metrics", address)


async def _metrics(parts: Parts) -> Response:
    return Response(await scrape(parts), media_type=CONTENT_TYPE_LATEST)


async def _openapi(parts: Parts) -> Response:
    return _json(describe())


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def scrape(parts: Parts) -> bytes:
    """All metrics in Prometheus' text format."""
    sessions = await _soon(parts, lambda: parts.store.count_sessions(active=True))
    parts.meters.show(
        queues=parts.worker.queue_lengths(),
        engine=await _soon(parts, parts.engine.stats) or {},
        samples_in_flight=parts.worker.samples_in_flight,
        journal_bytes=parts.worker.journal_bytes,
        ready=float(not parts.readiness.reasons),
        **({} if sessions is None else {"sessions_active": sessions}),
    )
    return parts.meters.text()


async def _soon(parts: Parts, read: Callable[[], Awaitable[T]]) -> T | None:
    """What an engine or a store says; None from one that is starting or out of reach.

    The rest of the page does not wait for it.
    """
    try:
        async with time_limit(parts.clock, _PATIENCE_S):
            return await read()
    except TinkerError as error:
        _log.debug("a value of /metrics is missing: %s", error)
    return None
