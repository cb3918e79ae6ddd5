"""One request as a handler sees it: the caller, the parts of the server, the body."""

from __future__ import annotations

import asyncio
import io
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import anyio
import anyio.to_thread
from starlette.responses import Response

from tinkex.engine.protocol import ModelSpec
from tinkex.errors import quoted
from tinkex.server.api.access import FULL
from tinkex.server.api.errors import refuse
from tinkex.server.api.limits import BodyRoom
from tinkex.server.cluster.roster import NoNodeError
from tinkex.server.observability.requests import header_value, keep_sent_body, request_record
from tinkex.server.store.records import CheckpointKind
from tinkex.types.bounds import (
    ID_CHARACTERS,
    JSON_PARTS,
    JSON_VALUES,
    PAGE_ITEMS,
    PROTOBUF_PARTS,
    SAMPLE_BYTES,
    SAMPLE_JSON_VALUES,
    TEXT_CHARACTERS,
    TRAINING_JSON_BYTES,
    TRAINING_JSON_PARTS,
    TRAINING_JSON_VALUES,
)
from tinkex.wire.bounded import whole_number
from tinkex.wire.compression import content_bytes, decompress
from tinkex.wire.json_codec import encode
from tinkex.wire.json_requests import decode_request
from tinkex.wire.json_scan import Counts, count_values
from tinkex.wire.proto_scan import check_shapes, count_parts
from tinkex.wire.routes import ASAMPLE, FORWARD, FORWARD_BACKWARD, MEDIA_PROTOBUF, TELEMETRY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine
    from tinkex.errors import APIStatusError
    from tinkex.server.api.access import Access
    from tinkex.server.api.downloads import Exports
    from tinkex.server.api.identity import Identity
    from tinkex.server.api.imports import Imports
    from tinkex.server.api.limits import TenantLimits
    from tinkex.server.cluster.member import Member
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

_TRAINING = frozenset(route.name for route in (FORWARD_BACKWARD, FORWARD))
_LARGE_ROUTES = frozenset(route.name for route in (ASAMPLE, TELEMETRY))
# Above this size, decompressing and counting on the loop would delay other requests noticeably.
_LARGE_BYTES = 1 << 20
# Bodies up to this size are not counted: their connections bound them.
_SMALL_BYTES = 1 << 16
# What large bodies of one tenant may take in memory while they arrive, and while they are unpacked.
_TENANT_BYTES = 128 << 20
_JSON = Counts(JSON_PARTS, JSON_VALUES)
_SAMPLE_JSON = Counts(JSON_PARTS, SAMPLE_JSON_VALUES)
_TRAINING_JSON = Counts(TRAINING_JSON_PARTS, TRAINING_JSON_VALUES)
# What older clients send may be put in order object by object, which then takes a thread.
_MANY_PARTS = 2048


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
    # This node's part in a cluster; None for a server without others.
    member: Member | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, its caller, and the server's parts. Handlers keep nothing else."""

    request: Request
    parts: Parts
    owner: str
    access: Access = FULL

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
        return header_value(self.request.scope, name)

    def param(self, name: str) -> str:
        """A parameter of the path; a checkpoint id has two parts."""
        values = self.request.path_params
        value = _checkpoint_id(values) if name == "ckpt" else str(values[name])
        if len(value) > TEXT_CHARACTERS:
            raise refuse(404, f"There is no {quoted(value)}.")
        return value

    def number(self, name: str, default: int, *, most: int = PAGE_ITEMS) -> int:
        """A number of the query string."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        number = whole_number(text)
        if number is None or number > most:
            raise refuse(
                400, f"{name} must be a whole number from 0 to {most}, not {quoted(text)}."
            )
        return number

    def idempotency_key(self) -> str:
        """By which a request without a number is recognised when it is sent again, or nothing."""
        key = self.header("x-idempotency-key")
        if len(key) > ID_CHARACTERS:
            raise refuse(
                400, f"X-Idempotency-Key may have {ID_CHARACTERS} characters, not {len(key)}."
            )
        return key

    def link(self, path: str) -> str:
        """An absolute URL of this server, below whatever prefix it is mounted at."""
        if self.settings.public_url is not None:
            return f"{self.settings.public_url.rstrip('/')}{path}"
        url = self.request.url
        prefix = str(self.request.scope.get("root_path", "")).rstrip("/")
        return f"{url.scheme}://{url.netloc}{prefix}{path}"

    async def json(self, kind: type[T]) -> T:
        """The body as one of the protocol's requests; an empty body is an empty object."""
        body = await self.body() or b"{}"
        if request_record(self.request.scope).parts > _MANY_PARTS:
            return await anyio.to_thread.run_sync(decode_request, kind, body)
        return decode_request(kind, body)

    async def body(self) -> bytes:
        """The body, decompressed, within the server's limits."""
        return await read_body(self.request, self.settings, self.parts.uploads)

    def hides(self, project_id: str | None) -> bool:
        """Whether something of the caller's is in a project that its key does not see."""
        return not self.access.sees(project_id)

    async def session(self, session_id: str) -> StoredSession:
        """One of the caller's sessions."""
        session = await self.store.get_session(session_id)
        if session is None or session.owner != self.owner or self.hides(session.project_id):
            raise refuse(404, f"There is no session {quoted(session_id)}.")
        return session

    async def live_session(self, session_id: str) -> StoredSession:
        """One of the caller's sessions that still takes work."""
        session = await self.session(session_id)
        if not session.active:
            raise refuse(400, f"Session {quoted(session_id)} is over; start a new one.")
        return session

    async def model(self, model_id: str) -> Model:
        """One of the caller's models."""
        request_record(self.request.scope).model_id = model_id[:ID_CHARACTERS]
        model = await self.store.get_model(model_id)
        if model is None or model.owner != self.owner or self.hides(model.project_id):
            raise refuse(404, f"There is no model {quoted(model_id)}.")
        return model

    @property
    def base_models(self) -> Sequence[ModelSpec]:
        """The base models that are served, by this node or by another."""
        specs, member = self.parts.engine.models, self.parts.member
        if member is None:
            return specs
        here = {spec.name for spec in specs}
        others = [model for name, model in member.roster.base_models.items() if name not in here]
        return [*specs, *(ModelSpec(**asdict(model)) for model in others)]

    async def base_model(self, name: str) -> ModelSpec:
        """A base model that is served."""
        spec = await self.find_base_model(name)
        if spec is not None:
            return spec
        member = self.parts.member
        if member is None:
            raise _unknown_model(name, {spec.name: () for spec in self.base_models})
        raise _unknown_model(name, member.roster.serving)

    async def find_base_model(self, name: str) -> ModelSpec | None:
        """A base model that is served, or was lately: nodes that ended are started again."""
        for spec in self.base_models:
            if spec.name == name:
                return spec
        member = self.parts.member
        if member is None:
            return None
        found = (await self._hold(member, lambda: member.roster.remembered)).get(name)
        return None if found is None else ModelSpec(**asdict(found))

    async def _hold(self, member: Member, look: Callable[[], T]) -> T:
        """Hold the request until there is a node for it, for a while."""
        try:
            return await member.when(look)
        except NoNodeError as error:
            raise no_node(error) from error

    async def own(self, key: str, base_model: str, *, here: bool = False) -> None:
        """Go on only at the node that owns a key; raises `Elsewhere` at any other."""
        member = self.parts.member
        if member is not None:
            try:
                await member.own(key, owner=self.owner, base_model=base_model, here=here)
                request_record(self.request.scope).epoch = member.keys.owned[key].epoch
            except NoNodeError as error:
                raise no_node(error) from error

    async def at_owner(self, key: str) -> None:
        """Go on only at the owner of a key, if it has one; nothing is claimed."""
        member = self.parts.member
        if member is not None:
            try:
                await member.at_owner(key)
            except NoNodeError as error:
                raise no_node(error) from error

    async def at_engine(self, base_model: str | None = None) -> None:
        """Go on only at a node whose engine serves a base model, or any; this one if it does."""
        member = self.parts.member
        if member is not None:
            await self._hold(member, lambda: member.roster.at_engine(base_model))


def no_node(error: NoNodeError) -> APIStatusError:
    """The refusal of a request that no node can answer now."""
    return refuse(503, str(error), headers={"retry-after": "1"})


def _unknown_model(name: str, served: Mapping[str, Sequence[str]]) -> APIStatusError:
    """The refusal of a base model; `served` has those there are, each with its nodes."""
    listed = ", ".join(f"{one} (on {', '.join(on)})" if on else one for one, on in served.items())
    keys = {key.lower(): one for one in served for key in (one, one.rpartition("/")[2])}
    near = [keys[key] for key in get_close_matches(name.lower(), keys, 1, _NEAR)]
    guess = f" Did you mean {quoted(near[0])}?" if near else ""
    return refuse(
        400,
        f"Base model {quoted(name)} is not served here; there is: {listed}.{guess} "
        "To serve others, name them when the server starts: tinkex serve --base-model NAME, or "
        "TINKEX_EMBEDDED_MODELS for the embedded server.",
    )


def _checkpoint_id(values: Mapping[str, Any]) -> str:
    kind, name = values.get("kind"), values["name"]
    if kind not in get_args(CheckpointKind):
        given = name if kind is None else f"{kind}/{name}"
        raise refuse(
            400,
            f"{quoted(given)} is not a checkpoint id. A checkpoint id is weights/NAME or "
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
        raise refuse(400, f"access_scope must be owned or accessible, not {quoted(scope)}.")


async def read_body(request: Request, settings: ServerSettings, uploads: Uploads) -> bytes:
    """The body, decompressed; raises 408, 413, 415, or an InputError for a bad frame."""
    most, most_decoded = _limits(request, settings)
    encoding = header_value(request.scope, "content-encoding").strip().lower()
    if encoding not in ("", "identity", "zstd"):
        raise refuse(
            415, f"Content-Encoding {quoted(encoding)} is not understood; use zstd or none."
        )
    if declares_more(request, most):
        raise _too_large(most)
    record = request_record(request.scope)
    declared = whole_number(header_value(request.scope, "content-length"))
    sent = await uploads.within_limit(
        _receive(request, most)
        if declared is not None and declared <= _SMALL_BYTES
        else _receive_in_turn(uploads, record.owner or "", most, declared, request)
    )
    # Another node may have to answer; it is sent the same bytes.
    keep_sent_body(request.scope, sent)
    protobuf = header_value(request.scope, "content-type").startswith(MEDIA_PROTOBUF)
    counts = _most_values(record.route)

    def unpack() -> tuple[bytes, Counts]:
        body = decompress(sent, most_decoded) if encoding == "zstd" else sent
        return body, _count_protobuf(body) if protobuf else _count_json(body, counts)

    size = content_bytes(sent) if encoding == "zstd" else len(sent)
    if size is not None and size <= _LARGE_BYTES:
        body, counted = unpack()
    else:
        room = most_decoded if size is None else size
        async with uploads.unpacking.of(record.owner or "", room):
            body, counted = await anyio.to_thread.run_sync(unpack)
    record.bytes_in, record.bytes_decoded = len(sent), len(body)
    record.parts, record.values = counted
    return body


async def _receive_in_turn(
    uploads: Uploads, owner: str, most: int, declared: int | None, request: Request
) -> bytes:
    async with uploads.receiving.of(owner, most if declared is None else declared):
        return await _receive(request, most)


def _most_values(route: str) -> Counts:
    if route in _TRAINING:
        return _TRAINING_JSON
    # Prompts are lists of tokens.
    return _SAMPLE_JSON if route == ASAMPLE.name or route.startswith("openai") else _JSON


def declares_more(request: Request, most: int) -> bool:
    """Whether a body is announced as larger than `most` bytes."""
    declared = header_value(request.scope, "content-length")
    size = whole_number(declared)
    return size > most if size is not None else declared.isdigit()


def _limits(request: Request, settings: ServerSettings) -> tuple[int, int]:
    """The most bytes of a body, as it comes and unpacked."""
    route, most, decoded = (
        request_record(request.scope).route,
        settings.max_body_bytes,
        settings.max_decoded_bytes,
    )
    if route in _TRAINING:
        if header_value(request.scope, "content-type").startswith(MEDIA_PROTOBUF):
            return most, decoded
        return min(most, TRAINING_JSON_BYTES), min(decoded, TRAINING_JSON_BYTES)
    if route in _LARGE_ROUTES:
        return min(most, SAMPLE_BYTES), min(decoded, SAMPLE_BYTES)
    small = min(settings.max_small_body_bytes, most)
    return small, small


async def _receive(request: Request, most: int) -> bytes:
    # Joining a list of parts would copy a large body in one step of the event loop; this copies
    # each part when it arrives, and its content is returned without another copy.
    whole = io.BytesIO()
    async for part in request.stream():
        if whole.tell() + len(part) > most:
            raise _too_large(most)
        whole.write(part)
    return whole.getvalue()


def _count_protobuf(body: bytes) -> Counts:
    count = count_parts(body, PROTOBUF_PARTS)
    if count > PROTOBUF_PARTS:
        raise refuse(413, f"A body may have {PROTOBUF_PARTS} parts; send fewer datums.")
    if len(body) > _LARGE_BYTES:
        check_shapes(body)  # a large body that will be refused is neither stored nor sent on
    return Counts(count, count)


def _count_json(body: bytes, most: Counts) -> Counts:
    if len(body) <= _MANY_PARTS:
        return Counts(0, 0)  # too short to have many
    counts = count_values(body, most)
    if counts.parts > most.parts:
        raise refuse(413, f"A body may have {most.parts} lists and objects; send less at once.")
    if counts.values > most.values:
        raise refuse(413, f"A body may have {most.values} values; send less at once.")
    return counts


def _too_large(most: int) -> Exception:
    return refuse(413, f"A body may have {most} bytes here; send less at once.")


class Uploads:
    """Aborts bodies that do not arrive in time. `run()` is its one long-lived task.

    One task watches all of them: a timer per request would cost more than most requests.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self.receiving = BodyRoom(_TENANT_BYTES)
        self.unpacking = BodyRoom(_TENANT_BYTES)
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
            # First, because bodies may be open when this task is started again.
            while self._open:
                await self._clock.sleep(next(iter(self._open.values())) - self._clock.now())
                self._give_up_late()
            await self._bell.wait()
            self._bell = anyio.Event()

    def _give_up_late(self) -> None:
        now = self._clock.now()
        for limit, deadline in self._open.items():
            if deadline <= now and not limit.expired():
                limit.reschedule(0)  # in the past, so it expires at once
