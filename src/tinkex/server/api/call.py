"""One request as a handler sees it: the caller, the parts of the server, the body."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import anyio
import anyio.to_thread
from starlette.responses import Response

from tinkex.server.api.errors import refuse
from tinkex.server.observability.requests import request_record
from tinkex.server.store.records import CheckpointKind
from tinkex.wire.compression import decompress
from tinkex.wire.json_codec import encode
from tinkex.wire.json_requests import decode_request
from tinkex.wire.proto_scan import has_more_parts
from tinkex.wire.routes import ASAMPLE, FORWARD, FORWARD_BACKWARD, MEDIA_PROTOBUF, TELEMETRY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine, ModelSpec
    from tinkex.errors import APIStatusError
    from tinkex.server.api.downloads import Exports
    from tinkex.server.api.identity import Identity
    from tinkex.server.api.imports import Imports
    from tinkex.server.api.limits import TenantLimits
    from tinkex.server.observability.meters import Meters, Readiness
    from tinkex.server.observability.requests import Polls
    from tinkex.server.scheduler.outcomes import Waiters
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Model, StoredSession

    Handler = Callable[["Call"], Awaitable[Response]]
    from collections.abc import Awaitable

T = TypeVar("T")

# How similar a name must be to be suggested: an equal owner's part alone is not enough.
_NEAR = 0.75

_LARGE_ROUTES = frozenset(route.name for route in (FORWARD_BACKWARD, FORWARD, ASAMPLE, TELEMETRY))
# Above this size, decompressing on the loop would delay other requests noticeably.
_LARGE_BYTES = 1 << 20
# Decoded, `[[],[],…]` takes twenty times its bytes and empty protobuf messages thirty times. A
# datum has about four parts in protobuf and fifteen in JSON, so these are 16,000 datums: many
# times what clients send at once, and about a second of decoding.
MAX_PROTOBUF_PARTS = 1 << 16
MAX_JSON_PARTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server is made of."""

    store: Store
    engine: Engine
    settings: ServerSettings
    clock: Clock
    worker: Worker
    waiters: Waiters
    identity: Identity
    limits: TenantLimits
    exports: Exports
    imports: Imports
    new_id: Callable[[], str]
    # For operators: metrics, readiness, and bodies that are too slow.
    meters: Meters
    readiness: Readiness
    uploads: Uploads
    polls: Polls


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, its caller, and the server's parts. Handlers keep nothing else."""

    request: Request
    parts: Parts
    owner: str

    @property
    def store(self) -> Store:
        """What the server remembers."""
        return self.parts.store

    @property
    def settings(self) -> ServerSettings:
        """The server's settings."""
        return self.parts.settings

    @property
    def worker(self) -> Worker:
        """Where operations go."""
        return self.parts.worker

    @property
    def address(self) -> str:
        """Where the request came from."""
        return "" if self.request.client is None else self.request.client.host

    def now(self) -> float:
        """Seconds since the epoch."""
        return self.parts.clock.wall()

    def header(self, name: str) -> str:
        """A request header, or an empty string."""
        return self.request.headers.get(name, "")

    def param(self, name: str) -> str:
        """A parameter of the path; a checkpoint id has two parts."""
        values = self.request.path_params
        return _checkpoint_id(values) if name == "ckpt" else str(values[name])

    def number(self, name: str, default: int, *, most: int = 10_000) -> int:
        """A number of the query string."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) > most:
            raise refuse(400, f"{name} must be a whole number from 0 to {most}, not {text!r}.")
        return int(text)

    def link(self, path: str) -> str:
        """An absolute URL of this server, below whatever prefix it is mounted at."""
        url = self.request.url
        prefix = str(self.request.scope.get("root_path", "")).rstrip("/")
        return f"{url.scheme}://{url.netloc}{prefix}{path}"

    async def json(self, kind: type[T]) -> T:
        """The body as one of the protocol's requests; an empty body is an empty object."""
        return decode_request(kind, await self.body() or b"{}")

    async def body(self) -> bytes:
        """The body, decompressed, within the server's limits."""
        return await read_body(self.request, self.settings, self.parts.uploads)

    async def session(self, session_id: str) -> StoredSession:
        """One of the caller's sessions."""
        session = await self.store.get_session(session_id)
        if session is None or session.owner != self.owner:
            raise refuse(404, f"There is no session {session_id!r}.")
        return session

    async def live_session(self, session_id: str) -> StoredSession:
        """One of the caller's sessions that still takes work."""
        session = await self.session(session_id)
        if not session.active:
            raise refuse(400, f"Session {session_id!r} is over; start a new one.")
        return session

    async def model(self, model_id: str) -> Model:
        """One of the caller's models."""
        request_record(self.request.scope).model_id = model_id
        model = await self.store.get_model(model_id)
        if model is None or model.owner != self.owner:
            raise refuse(404, f"There is no model {model_id!r}.")
        return model

    def base_model(self, name: str) -> ModelSpec:
        """A base model that this server serves."""
        for spec in self.parts.engine.models:
            if spec.name == name:
                return spec
        raise _unknown_model(name, [spec.name for spec in self.parts.engine.models])


def _unknown_model(name: str, served: Sequence[str]) -> APIStatusError:
    keys = {key.lower(): one for one in served for key in (one, one.rpartition("/")[2])}
    near = [keys[key] for key in get_close_matches(name.lower(), keys, 1, _NEAR)]
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return refuse(
        400,
        f"Base model {name!r} is not served here; there is: {', '.join(served)}.{guess} To serve "
        "others, name them when the server starts: tinkex serve --base-model NAME, or "
        "TINKEX_EMBEDDED_MODELS for the embedded server.",
    )


def _checkpoint_id(values: Mapping[str, Any]) -> str:
    kind, name = values.get("kind"), values["name"]
    if kind not in get_args(CheckpointKind):
        given = name if kind is None else f"{kind}/{name}"
        raise refuse(
            400,
            f"{given!r} is not a checkpoint id. A checkpoint id is weights/NAME or "
            "sampler_weights/NAME (external_weights/NAME for an export).",
        )
    return f"{kind}/{name}"


def reply(value: object = None, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON reply; without a value an empty object, which also serves as an empty result."""
    body = b"{}" if value is None else encode(value)
    return Response(body, media_type="application/json", headers=dict(headers or {}))


def check_scope(request: Request) -> None:
    """Refuse an unknown `access_scope`; the routes that have one read it themselves."""
    if not request.scope["query_string"]:
        return
    scope = request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise refuse(400, f"access_scope must be owned or accessible, not {scope!r}.")


async def read_body(request: Request, settings: ServerSettings, uploads: Uploads) -> bytes:
    """The body, decompressed; raises 408, 413, 415, or an InputError for a bad frame."""
    most, most_decoded = _limits(request, settings)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise refuse(415, f"Content-Encoding {encoding!r} is not understood; use zstd or none.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    body = await uploads.within_limit(_receive(request, most))
    if encoding == "zstd":
        body = await _unpacked(body, most_decoded)
    _check_parts(body, request.headers.get("content-type", ""))
    return body


def _limits(request: Request, settings: ServerSettings) -> tuple[int, int]:
    if request_record(request.scope).route in _LARGE_ROUTES:
        return settings.max_body_bytes, settings.max_decoded_bytes
    small = min(settings.max_small_body_bytes, settings.max_body_bytes)
    return small, small


async def _receive(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


async def _unpacked(body: bytes, most: int) -> bytes:
    if len(body) < _LARGE_BYTES:
        return decompress(body, most)
    return await anyio.to_thread.run_sync(decompress, body, most)


def _check_parts(body: bytes, content_type: str) -> None:
    if content_type.startswith(MEDIA_PROTOBUF):
        if has_more_parts(body, MAX_PROTOBUF_PARTS):
            raise refuse(413, f"A body may have {MAX_PROTOBUF_PARTS} parts; send fewer datums.")
    elif body.count(b"[") + body.count(b"{") > MAX_JSON_PARTS:
        raise refuse(413, f"A body may have {MAX_JSON_PARTS} lists and objects; send less at once.")


def _too_large(most: int) -> Exception:
    return refuse(413, f"A body may have {most} bytes here; send less at once.")


class Uploads:
    """Aborts bodies that do not arrive in time. `run()` is its one long-lived task.

    One task watches all of them: a timer per request would cost more than most requests.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        # Mutable state: the bodies being read, oldest first, and the event that wakes the watcher.
        self._open: dict[asyncio.Timeout, float] = {}
        self._bell = anyio.Event()

    async def within_limit(self, reading: Awaitable[bytes]) -> bytes:
        """What is read; raises a 408 when that takes longer than the limit."""
        limit = asyncio.timeout(None)
        self._open[limit] = self._clock.now() + self._limit_s
        self._bell.set()
        try:
            async with limit:
                return await reading
        except TimeoutError:
            if not limit.expired():
                raise
            detail = f"The body did not arrive within {self._limit_s:g} s; send it again."
            raise refuse(408, detail) from None
        finally:
            del self._open[limit]

    async def run(self) -> None:
        """Watch until cancelled; asleep while nothing is being read."""
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            while self._open:
                await self._clock.sleep(next(iter(self._open.values())) - self._clock.now())
                self._give_up_late()

    def _give_up_late(self) -> None:
        now = self._clock.now()
        for limit, deadline in self._open.items():
            if deadline <= now and not limit.expired():
                limit.reschedule(0)  # in the past, so it expires at once
