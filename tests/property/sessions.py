"""Whole sessions of two tenants: random calls in legal and illegal order, with kills in between.

    python -m tests.property.sessions --seconds 60       a fake server on virtual time
    python -m tests.property.sessions --real --seconds 600    a real `tinkex serve` with keys
    python -m tests.property.sessions --seed 17          one sequence again
    python -m tests.property.sessions --input FILE       steps that were written by a finding

A sequence is a list of steps, each with a number that chooses its arguments, so that a step means
the same when others are left out. The rules, after every step and at the end:

- no answer is a 5xx, but 501 where the docs list it, and 503 while an engine is started again;
- no answer to one tenant contains a text of the other's;
- every operation that was accepted ends, whatever was killed;
- when all sessions are over, the server holds nothing of them in memory;
- (`--real`) nothing holds the event loop for 100 ms.

On a finding the steps are shortened and printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from tests.cross_tenant import LOSS, PROMPT
from tests.docs.test_server_page import not_implemented
from tinkex.types import Datum, ModelInput
from tinkex.wire.proto_training import encode_forward_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = "tinkex/tiny"
MARKS = ("mark-of-one-7c1e", "mark-of-two-9b3d")
PROTOBUF = "application/x-protobuf"
STEPS = 40
# More than any operation waits for others: a missing number, a silent session.
LONG_S = 3600.0
_NOT_IMPLEMENTED = not_implemented()
_WORD = re.compile(r"[\w.-]+")
_ODD: list[Any] = [-1, 0, 2**31, 2**63 - 1, 2**63, 2**70, 1.5, 1e308, "", "x", None, True, [], {}]
_DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


@dataclass(frozen=True)
class Step:
    """One thing that happens; `seed` chooses its details."""

    tenant: int
    name: str
    seed: int


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class Broken(AssertionError):
    """A rule that does not hold."""


class Driver(Protocol):
    """A server under test, fake or real."""

    async def send(
        self, tenant: int, method: str, path: str, body: bytes | None, media: str
    ) -> Answer | None:
        """An answer; None when the server died before it came."""
        ...

    async def kill(self, victim: str) -> None: ...
    async def wait(self, seconds: float) -> None: ...
    async def check_rest(self) -> None:
        """Raise Broken when something is left of sessions that are all over."""
        ...


# -- what a tenant knows, and what it sends -------------------------------------------------------


@dataclass
class Tenant:
    """The names that a tenant has been given, and its numbers. Mutable state."""

    number: int
    sessions: list[str] = field(default_factory=list[str])
    models: list[str] = field(default_factory=list[str])
    samplers: list[str] = field(default_factory=list[str])
    paths: list[str] = field(default_factory=list[str])
    losses: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])
    numbers: Counter[str] = field(default_factory=Counter[str])
    said: set[str] = field(default_factory=set[str])
    """Words with the other's mark that it has sent itself: an error may repeat them."""

    @property
    def mark(self) -> str:
        return MARKS[self.number]


@dataclass
class Choice:
    """The arguments of one step, chosen by its seed."""

    rng: random.Random
    me: Tenant
    other: Tenant

    def name(self, kind: str) -> str:
        """Mostly one of mine; sometimes the other's, of another kind, or nobody's."""
        roll = self.rng.random()
        mine: list[str] = getattr(self.me, kind)
        if roll < 0.06:
            mine = getattr(self.other, kind)
        elif roll < 0.09:
            mine = [*self.me.sessions, *self.me.models, *self.me.samplers, *self.me.requests]
        if not mine or roll > 0.97:
            return self.rng.choice(["", "x", "../x", "a:b:c", "session-0:train:99", "\0", "é" * 50])
        return self.rng.choice(mine[-4:])

    def next(self, owner: str) -> Any:
        """The number that is due; sometimes an old one, one too far, or none."""
        roll = self.rng.random()
        if roll < 0.03:
            return self.rng.choice(_ODD)
        if roll < 0.08:
            return self.me.numbers[owner] + self.rng.randrange(1, 4)
        if roll < 0.13:
            return max(0, self.me.numbers[owner] - 1)
        self.me.numbers[owner] += 1
        return self.me.numbers[owner] - 1

    def few(self, *values: Any) -> Any:
        """One of a few legal values, rarely something odd."""
        return self.rng.choice(_ODD) if self.rng.random() < 0.04 else self.rng.choice(values)

    def text(self) -> str:
        """A text of mine."""
        return f"{self.me.mark}-{self.rng.randrange(100)}"


Request = tuple[str, str, Any]


def _post(path: str, /, **members: Any) -> Request:
    return "POST", f"/api/v1/{path}", members


def _train(c: Choice) -> Request:
    model, config = c.name("models"), {}
    loss = c.few("cross_entropy", "cross_entropy", "importance_sampling", "custom", "nonsense")
    if loss == "custom":
        config = {"loss_id": c.name("losses")}
    number = c.next(model)
    try:
        body = encode_forward_backward(
            model_id=model,
            seq_id=number if isinstance(number, int) and 0 <= number < 2**31 else 0,
            data=[_DATUM] * c.rng.choice((1, 1, 2, 5, 0)),
            loss_fn=str(loss),
            loss_fn_config=config,
        )
    except (TypeError, ValueError, UnicodeError):
        return _post("forward_backward", model_id=model)
    if c.rng.random() < 0.1:
        at = c.rng.randrange(len(body) + 1)
        body = body[:at] + c.rng.randbytes(c.rng.randrange(4)) + body[at + c.rng.randrange(6) :]
    return "POST", "/api/v1/forward_backward", body


def _optim(c: Choice) -> Request:
    model = c.name("models")
    rate = c.few(0.1, 1e-3, 0.0)
    return _post(
        "optim_step", model_id=model, seq_id=c.next(model), adam_params={"learning_rate": rate}
    )


def _save(c: Choice, route: str) -> Request:
    model = c.name("models")
    members: dict[str, Any] = {"model_id": model, "seq_id": c.next(model)}
    if route == "save_weights_for_sampler" and c.rng.random() < 0.6:
        members["sampling_session_seq_id"] = c.next(model.partition(":")[0] + "samplers")
    else:
        members["path"] = c.few(c.text(), c.text(), "../x", "a b")
    if c.rng.random() < 0.2:
        members["ttl_seconds"] = c.few(1, 60, 10**6)
    return _post(route, **members)


def _load(c: Choice) -> Request:
    if c.rng.random() < 0.5:
        model = c.name("models")
        return _post(
            "load_weights",
            model_id=model,
            seq_id=c.next(model),
            path=c.name("paths"),
            optimizer=c.few(False, True),
        )
    session = c.name("sessions")
    return _post(
        "load_weights",
        session_id=session,
        model_seq_id=c.next(session + "models"),
        path=c.name("paths"),
        optimizer=False,
    )


def _sample(c: Choice) -> Request:
    sampler = c.name("samplers")
    return _post(
        "asample",
        sampling_session_id=sampler,
        seq_id=c.next(sampler),
        num_samples=c.few(1, 1, 2, 4, 0),
        prompt=c.few(PROMPT, PROMPT, {"chunks": []}),
        sampling_params={"max_tokens": c.few(1, 4, 16), "temperature": c.few(1.0, 0.0)},
        prompt_logprobs=c.few(False, True),
        topk_prompt_logprobs=c.few(0, 0, 3),
    )


def _create_model(c: Choice) -> Request:
    session = c.name("sessions")
    return _post(
        "create_model",
        session_id=session,
        model_seq_id=c.next(session + "models"),
        base_model=c.few(MODEL, MODEL, MODEL, "other"),
        lora_config={"rank": c.few(4, 8)},
        user_metadata={"about": c.text()},
    )


def _create_sampler(c: Choice) -> Request:
    session = c.name("sessions")
    what = {"base_model": MODEL} if c.rng.random() < 0.6 else {"model_path": c.name("paths")}
    number = c.next(session + "samplers")
    return _post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=number, **what
    )


def _futures(c: Choice) -> Request:
    target = {"type": "sampling_session", "sampling_session_id": c.name("samplers")}
    return _post(
        "retrieve_futures",
        target={**target, "cloned_sampler_id": c.few(0, 1)},
        prev_cursor=c.few(0, 1, 10),
        timeout=c.few(0.0, 1.0),
        retrieved_request_ids=[c.name("requests")],
    )


def _checkpoint(c: Choice, method: str, tail: str, body: Any = None) -> Request:
    run, _, name = c.name("paths").removeprefix("tinker://").partition("/")
    path = f"{run or 'x'}/checkpoints/{name or 'weights/x'}".replace("\0", "%00").replace(
        "é", "%e9"
    )
    return method, f"/api/v1/training_runs/{path}{tail}", body


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe=":") or "x"


CALLS: dict[str, tuple[int, Callable[[Choice], Request]]] = {
    "create_session": (
        4,
        lambda c: _post(
            "create_session",
            tags=[c.text()],
            user_metadata={"about": c.text()},
            sdk_version=c.few("0.36.0", "0.18.0"),
            project_id=c.few(None, c.text()),
            display_name=c.text(),
        ),
    ),
    "session_heartbeat": (2, lambda c: _post("session_heartbeat", session_id=c.name("sessions"))),
    "finish_session": (
        2,
        lambda c: _post(
            f"sessions/{_quoted(c.name('sessions'))}/finish",
            reason={"type": c.few("success", "errored")},
            detail=c.few(None, c.text()),
        ),
    ),
    "set_session_project": (
        1,
        lambda c: (
            "PUT",
            f"/api/v1/sessions/{_quoted(c.name('sessions'))}/project",
            {"project_id": c.text()},
        ),
    ),
    "get_session": (1, lambda c: ("GET", f"/api/v1/sessions/{_quoted(c.name('sessions'))}", None)),
    "export_trace": (
        1,
        lambda c: ("GET", f"/api/v1/sessions/{_quoted(c.name('sessions'))}/trace_export", None),
    ),
    "search_sessions": (
        1,
        lambda c: _post("sessions/search", limit=c.few(1, 50), display_name=c.few(None, c.text())),
    ),
    "list_sessions": (
        1,
        lambda c: ("GET", f"/api/v1/sessions?limit={c.few(1, 100)}&offset={c.few(0, 3)}", None),
    ),
    "create_model": (6, _create_model),
    "unload_model": (1, lambda c: _post("unload_model", model_id=c.name("models"))),
    "get_info": (1, lambda c: _post("get_info", model_id=c.name("models"))),
    "forward_backward": (8, _train),
    "optim_step": (6, _optim),
    "save_weights": (5, lambda c: _save(c, "save_weights")),
    "save_weights_for_sampler": (3, lambda c: _save(c, "save_weights_for_sampler")),
    "save_weights_external": (1, lambda c: _save(c, "save_weights_external")),
    "load_weights": (2, _load),
    "create_custom_loss": (
        1,
        lambda c: _post(
            "create_custom_loss",
            **{**LOSS, "session_id": (s := c.name("sessions")), "name": c.text()}
            | {"custom_loss_seq_id": c.next(s + "losses")},
        ),
    ),
    "create_sampling_session": (3, _create_sampler),
    "join_sampling_session": (
        1,
        lambda c: _post("join_sampling_session", sampling_session_id=c.name("samplers")),
    ),
    "asample": (8, _sample),
    "get_sampler": (1, lambda c: ("GET", f"/api/v1/samplers/{_quoted(c.name('samplers'))}", None)),
    "retrieve_future": (
        6,
        lambda c: _post(
            "retrieve_future",
            request_id=c.name("requests"),
            allow_metadata_only=c.few(False, True),
        ),
    ),
    "retrieve_futures": (2, _futures),
    "cancel_future": (2, lambda c: _post("cancel_future", request_id=c.name("requests"))),
    "release_numbers": (
        1,
        lambda c: _post(
            "tinkex/release_numbers", model_id=(m := c.name("models")), seq_ids=[c.next(m)]
        ),
    ),
    "attach_model": (
        1,
        lambda c: _post(
            "tinkex/attach_model", model_id=c.name("models"), session_id=c.name("sessions")
        ),
    ),
    "weights_info": (2, lambda c: _post("weights_info", tinker_path=c.name("paths"))),
    "copy_weights": (
        1,
        lambda c: _post(
            "copy_weights", source_path=c.name("paths"), destination_project_id=c.text()
        ),
    ),
    "publish_checkpoint": (2, lambda c: _checkpoint(c, "POST", "/publish")),
    "unpublish_checkpoint": (2, lambda c: _checkpoint(c, "DELETE", "/publish")),
    "set_checkpoint_ttl": (
        1,
        lambda c: _checkpoint(c, "PUT", "/ttl", {"ttl_seconds": c.few(None, 1, 3600)}),
    ),
    "get_checkpoint_archive": (2, lambda c: _checkpoint(c, "GET", "/archive")),
    "delete_checkpoint": (2, lambda c: _checkpoint(c, "DELETE", "")),
    "list_checkpoints": (1, lambda c: ("GET", "/api/v1/checkpoints", None)),
    "list_training_runs": (1, lambda c: ("GET", "/api/v1/training_runs", None)),
    "get_audit_log": (1, lambda c: ("GET", "/api/v1/audit", None)),
    "get_checkpoint_storage_usage": (
        1,
        lambda c: ("GET", "/api/v1/billing/usage/checkpoints/current", None),
    ),
    "openai_models": (1, lambda c: ("GET", "/v1/models", None)),
    "openai_completions": (
        1,
        lambda c: (
            "POST",
            "/v1/completions",
            {"model": c.few(MODEL, c.name("paths")), "prompt": [1, 2], "max_tokens": c.few(1, 3)},
        ),
    ),
}
_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
OTHERS: dict[str, int] = {"disconnect": 3, "wait": 4, "engine": 2, "server": 2}
"""A call that is given up, time that passes, and kills."""
_WEIGHTS = {**{name: weight for name, (weight, _) in CALLS.items()}, **OTHERS}


_START = ("create_session", "create_model", "create_sampling_session", "save_weights")


def planned(seed: int, steps: int = STEPS) -> list[Step]:
    """A random sequence; it begins so that most calls have something to name."""
    rng = random.Random(seed)
    names = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=steps)
    start = [name for name in _START for _ in range(2)]
    return [
        Step(number % 2 if number < len(start) else rng.randrange(2), name, rng.randrange(2**31))
        for number, name in enumerate([*start, *names])
    ]


def mutated(request: Request, rng: random.Random) -> Request:
    """The same with a member left out, added or odd."""
    method, path, body = request
    if not isinstance(body, dict) or not body:
        return request
    changed = dict(body)
    name = rng.choice(list(changed))
    match rng.randrange(3):
        case 0:
            del changed[name]
        case 1:
            changed[name] = rng.choice(_ODD)
        case _:
            changed[f"unknown-{rng.randrange(9)}"] = rng.choice(_ODD)
    return method, path, changed


# -- running a sequence ---------------------------------------------------------------------------


class Story:
    """Tells steps to a server and holds what came back against the rules."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # Mutable state: what each tenant knows, and what was accepted and has not ended.
        self._tenants = (Tenant(0), Tenant(1))
        self._accepted: list[tuple[int, str]] = []
        self._public: set[str] = set()

    async def tell(self, step: Step) -> None:
        """One step."""
        rng = random.Random(step.seed)
        if step.name in ("engine", "server"):
            await self._driver.kill(step.name)
        elif step.name == "wait":
            await self._driver.wait(rng.choice((0.0, 0.1, 1.0, 5.0, 40.0, 100.0)))
        else:
            await self._call(step, rng)

    async def _call(self, step: Step, rng: random.Random) -> None:
        me, other = self._tenants[step.tenant], self._tenants[1 - step.tenant]
        given_up = step.name == "disconnect"
        name = rng.choice(list(CALLS)) if given_up else step.name
        request = CALLS[name][1](Choice(rng, me, other))
        if rng.random() < 0.05:
            request = mutated(request, rng)
        if given_up:
            with anyio.move_on_after(0.0):
                await self._send(step.tenant, request)
            return
        answer = await self._send(step.tenant, request)
        if answer is not None:
            self._check(me, other, name, request, answer)
            self._learn(me, name, request[2], answer)

    async def _send(self, tenant: int, request: Request) -> Answer | None:
        method, path, body = request
        media = PROTOBUF if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return await self._driver.send(tenant, method, path, data, media)

    def _check(
        self, me: Tenant, other: Tenant, name: str, request: Request, answer: Answer
    ) -> None:
        known = answer.status == 501 and name in _NOT_IMPLEMENTED
        if answer.status >= 500 and answer.status != 503 and not known:
            raise Broken(f"{name} {request} -> {answer.status} {answer.body[:300]!r}")
        # A published checkpoint is for all to see.
        text = answer.body.decode(errors="replace")
        for sent in (request[1], str(request[2]), *self._public):
            me.said |= {word for word in _WORD.findall(sent) if other.mark in word}
        for word in me.said:
            text = text.replace(word, "")
        if other.mark in text:
            raise Broken(f"{name} {request} tells {me.mark} of the other: {answer.body[:500]!r}")
        if name == "publish_checkpoint" and answer.status == 200:
            self._public.add(request[1])

    def _learn(self, me: Tenant, name: str, sent: Any, answer: Answer) -> None:
        if answer.status != 200:
            return
        try:
            found = json.loads(answer.body)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        kind = _SAVED.get(name)
        if kind is not None and isinstance(sent.get("path"), str):
            me.paths.append(f"tinker://{sent.get('model_id')}/{kind}/{sent['path']}")
        for key, kind in (
            ("session_id", "sessions"),
            ("model_id", "models"),
            ("sampling_session_id", "samplers"),
            ("path", "paths"),
            ("tinker_path", "paths"),
            ("request_id", "requests"),
        ):
            value = found.get(key)
            if isinstance(value, str) and value not in getattr(me, kind):
                getattr(me, kind).append(value)
                me.numbers[value] = int(kind == "models")  # its creation had the first
        request_id = found.get("request_id")
        if isinstance(request_id, str) and "retrieve" not in name:
            session = request_id.partition(":")[0]  # the oldest clients name none and get one
            if session not in me.sessions:
                me.sessions.append(session)
            self._accepted.append((me.number, request_id))
            if ":loss:" in request_id:
                me.losses.append(request_id)

    async def end(self) -> None:
        """Every operation ends; then every session is ended, and nothing is left."""
        for tenant, request_id in self._accepted:
            for _ in range(1000):
                request = _post("retrieve_future", request_id=request_id)
                answer = await self._send(tenant, request)
                if answer is None or answer.status == 503:
                    continue
                me, other = self._tenants[tenant], self._tenants[1 - tenant]
                self._check(me, other, "retrieve_future", request, answer)
                if answer.status != 200 or b'"try_again"' not in answer.body[:200]:
                    break
            else:
                raise Broken(f"{request_id} does not end")
        for tenant in self._tenants:
            for session in tenant.sessions:
                body = {"reason": {"type": "success"}, "detail": None}
                await self._send(tenant.number, _post(f"sessions/{session}/finish", **body))
        await self._driver.check_rest()


class FakeDriver:
    """A server in this process, on virtual time, with an engine that can die."""

    def __init__(self) -> None:
        from tests.unit.server.mortal import World

        self._world = World(session_timeout_s=300.0, history_s=600.0, result_ttl_s=LONG_S)
        # Mutable state: the present life of the server.
        self._life = AsyncExitStack()
        self._api: Any = None

    async def __aenter__(self) -> FakeDriver:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._world.fate.buried.set()
        await self._life.aclose()

    async def _begin(self) -> None:
        self._world.fate.crashed, self._world.fate.buried = anyio.Event(), anyio.Event()
        self._life = AsyncExitStack()
        self._api = await self._life.enter_async_context(self._world.server())

    async def send(
        self, tenant: int, method: str, path: str, body: bytes | None, media: str
    ) -> Answer | None:
        from tinkex.transport.base import HttpRequest, Pool

        target, _, query = path.partition("?")
        key = f"tml-{tenant}"
        headers = {"x-api-key": key, "content-type": media, "authorization": f"Bearer {key}"}
        request = HttpRequest(method, target, Pool.REST, LONG_S, query, headers, body)
        reply = await self._api.transport.send(request)
        return Answer(reply.status, reply.body)

    async def kill(self, victim: str) -> None:
        if victim == "engine":
            self._world.engine.die()
        else:
            self._world.fate.buried.set()
            await self._life.aclose()
            await self._begin()

    async def wait(self, seconds: float) -> None:
        await self._world.clock.sleep(seconds)

    async def check_rest(self) -> None:
        for _ in range(50):  # sessions whose ids the tenants never got end by their silence
            await self._world.clock.sleep(60.0)
            held = self._api.server._parts.worker.held()
            if not any(held.values()):
                break
        else:
            raise Broken(f"all sessions are over, and the server holds {held}")
        pending = await self._world.store.pending()
        if pending:
            raise Broken(f"unfinished for ever: {pending[:3]}")


class RealDriver:
    """A real process with keys; kills are SIGKILL, time is real."""

    def __init__(self, folder: Path) -> None:
        from benchmarks.soak.supervised import Supervised

        settings = {"session_timeout_s": 20.0, "upkeep_interval_s": 2.0, "gap_timeout_s": 5.0}
        self._server = Supervised(folder, None, {**settings, "long_poll_s": 2.0})

    async def __aenter__(self) -> RealDriver:
        await anyio.to_thread.run_sync(self._server.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await anyio.to_thread.run_sync(self._server.__exit__)

    async def send(
        self, tenant: int, method: str, path: str, body: bytes | None, media: str
    ) -> Answer | None:
        return await anyio.to_thread.run_sync(
            self._send, tenant, method, path, body, media, abandon_on_cancel=True
        )

    def _send(
        self, tenant: int, method: str, path: str, body: bytes | None, media: str
    ) -> Answer | None:
        import http.client

        key = list(self._server.keys.values())[tenant]
        headers = {"x-api-key": key, "content-type": media, "authorization": f"Bearer {key}"}
        connection = http.client.HTTPConnection(self._server.url[7:], timeout=60.0)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return Answer(reply.status, reply.read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    async def kill(self, victim: str) -> None:
        await anyio.to_thread.run_sync(self._server.kill, victim)

    async def wait(self, seconds: float) -> None:
        await anyio.sleep(min(seconds, 1.0))

    async def check_rest(self) -> None:
        for _ in range(120):
            text = (await self._metrics()).splitlines()
            names = ("tinkex_sessions_active ", "tinkex_samples_in_flight ", "tinkex_queue_length")
            names += ("tinkex_engine_adapters_resident ",)
            left = [line for line in text if line.startswith(names) and line[-4:] != " 0.0"]
            if text and not left:
                break
            await anyio.sleep(0.5)
        else:
            raise Broken(f"all sessions are over: {left}")
        blocks = [line for line in text if line.startswith("tinkex_loop_blocks_total{")]
        if any(float(line.rpartition(" ")[2]) for line in blocks):
            raise Broken(f"the event loop was blocked: {blocks}")

    async def _metrics(self) -> str:
        answer = await self.send(0, "GET", "/metrics", None, "text/plain")
        return "" if answer is None else answer.body.decode()


async def _told(steps: list[Step], driver: Driver) -> None:
    story = Story(driver)
    for step in steps:
        await story.tell(step)
    await story.end()


async def _on_fake(steps: list[Step]) -> None:
    async with FakeDriver() as driver:
        await _told(steps, driver)


def problem_of(steps: list[Step]) -> str | None:
    """What is wrong with a sequence on a fake server."""
    try:
        with _quiet():
            asyncio.run(_on_fake(steps))
    except Exception as error:  # noqa: BLE001 - whatever is raised is a finding
        inner: BaseException = error
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        return f"{type(inner).__name__}: {inner}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log: failures of operations are what is asked for."""
    import logging

    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def shortened(steps: list[Step], seconds: float = 60.0) -> list[Step]:
    """The shortest sequence found that still breaks a rule: a prefix, then with steps left out."""
    end = time.monotonic() + seconds
    low, high = 0, len(steps)
    while low < high:  # the end of a story checks all rules, so failing prefixes stay failing
        middle = (low + high) // 2
        if problem_of(steps[:middle]):
            high = middle
        else:
            low = middle + 1
    kept = steps[:high] if problem_of(steps[:high]) else steps
    for step in list(kept):
        if time.monotonic() > end:
            break
        without = [each for each in kept if each is not step]
        if problem_of(without):
            kept = without
    return kept


def written(steps: list[Step]) -> str:
    return json.dumps([[step.tenant, step.name, step.seed] for step in steps])


def read(text: str) -> list[Step]:
    return [Step(*each) for each in json.loads(text)]


def search(first: int, count: int | None, seconds: float) -> tuple[int, str] | None:
    """The first seed whose sequence breaks a rule, and how."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end and (count is None or seed < first + count):
        found = problem_of(planned(seed))
        if found is not None:
            return seed, found
        seed += 1
    sys.stderr.write(f"{seed - first} sequences\n")
    return None


async def _real(first: int, seconds: float) -> tuple[int, str] | None:
    """Sequences one after the other on one real server."""
    end, seed = time.monotonic() + seconds, first
    with tempfile.TemporaryDirectory() as folder:
        async with RealDriver(Path(folder)) as driver:
            while time.monotonic() < end:
                try:
                    await _told(planned(seed), driver)
                except Exception as error:  # noqa: BLE001 - a finding
                    return seed, f"{type(error).__name__}: {error}"
                seed += 1
    sys.stderr.write(f"{seed - first} sequences\n")
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="only this sequence")
    parser.add_argument("--input", type=Path, help="only the steps in this file")
    parser.add_argument("--real", action="store_true", help="a real server process")
    args = parser.parse_args(arguments)
    if args.input is not None:
        found = problem_of(read(args.input.read_text()))
        if found:
            sys.stdout.write(f"{found[:2000]}\n")
        return 1 if found else 0
    if args.real:
        outcome = asyncio.run(_real(args.first, args.seconds))
    elif args.seed is not None:
        outcome = search(args.seed, 1, float("inf"))
    else:
        outcome = search(args.first, None, args.seconds)
    if outcome is None:
        return 0
    seed, problem = outcome
    steps = planned(seed) if args.real else shortened(planned(seed))
    sys.stdout.write(f"seed {seed}: {problem[:2000]}\n{written(steps)}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
