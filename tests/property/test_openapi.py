"""Random requests made from the server's own description: no 500, and every answer as described.

Schemathesis makes the requests, good ones and bad ones, with the ids of real things put in now and
then, so that they get past the first check. They go straight into the app.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import anyio.from_thread
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.docs.test_server_page import not_implemented
from tinkex.server import Settings
from tinkex.server.openapi import describe
from tinkex.testing import FakeClock, FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from anyio.from_thread import BlockingPortal

EXAMPLES = 25
KEY = "tml-one"
NOT_IMPLEMENTED = not_implemented()
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]

# Bytes like any other to whoever makes them up; test_import_fuzz.py sends better ones.
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
schema = schemathesis.openapi.from_dict(msgspec.json.decode(msgspec.json.encode(describe())))
OPERATIONS = {
    operation.ok().definition.raw["operationId"]: operation.ok()
    for operation in schema.get_all_operations()
}


class World:
    """A server with one of everything, in a loop of its own."""

    def __init__(self, portal: BlockingPortal) -> None:
        # Time stands still: between two requests it would run away and end the session.
        self.server = FakeServer(clock=FakeClock(), settings=Settings(long_poll_s=0.0))
        self._portal = portal
        # Mutable state: real ids, by the names that requests use for them.
        self.ids: dict[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.server:
            yield

    def send(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        return self._portal.call(self._send, method, target, headers, body)

    async def _send(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        split = urlsplit(target)
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(split.path),
            "raw_path": split.path.encode(),
            "query_string": split.query.encode(),
            "headers": [
                (k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("fake.invalid", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            for message in messages:
                return message
            return await anyio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.server.app(scope, receive, send)
        return sent

    def post(self, path: str, /, **members: Any) -> Any:
        headers = {"x-api-key": KEY, "content-type": "application/json"}
        sent = self.send("POST", f"/api/v1/{path}", headers, msgspec.json.encode(members))
        assert sent[0]["status"] == 200, sent
        return msgspec.json.decode(sent[1]["body"])

    def populate(self) -> None:
        """Make a session, a model with a checkpoint, and a sampler with a sample."""
        session = self.post("create_session", tags=[], user_metadata={}, sdk_version="x")
        self.ids["session_id"] = self.ids["session"] = session["session_id"]
        model = self.post(
            "create_model",
            session_id=session["session_id"],
            model_seq_id=0,
            base_model="tinkex/tiny",
            lora_config={"rank": 8},
        )
        self.ids["model_id"] = self.ids["run"] = model["model_id"]
        saved = self.post("save_weights", model_id=model["model_id"], seq_id=1, path="final")
        self.ids["request_id"] = saved["request_id"]
        self.ids.update(starting_on="2025-06-15T12:00:00Z", ending_before="2025-06-16T12:00:00Z")
        while (
            self.post("retrieve_future", request_id=saved["request_id"]).get("type") == "try_again"
        ):
            pass
        path = f"tinker://{model['model_id']}/weights/final"
        self.ids.update(tinker_path=path, source_path=path, model_path=path, name="final")
        self.ids.update(kind="weights", base_model="tinkex/tiny", path=path)
        sampler = self.post(
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            base_model="tinkex/tiny",
        )
        self.ids["sampling_session_id"] = self.ids["sampler"] = sampler["sampling_session_id"]


@pytest.fixture
def world() -> Iterator[World]:
    with anyio.from_thread.start_blocking_portal() as portal:
        made = World(portal)
        with portal.wrap_async_context_manager(made.running()):
            made.populate()
            yield made


def real(value: Any, ids: dict[str, str]) -> Any:
    """A body with the ids of real things wherever it names one."""
    if isinstance(value, dict):
        return {
            key: ids[key] if key in ids and isinstance(item, str) else real(item, ids)
            for key, item in value.items()
        }
    return [real(item, ids) for item in value] if isinstance(value, list) else value


# Hypothesis sees only that the state of `random` has changed while it drew. Its own draws do not
# use it; another thread of this process, such as one that an earlier test left, may.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_random_requests_are_answered_as_described(name: str, world: World) -> None:
    operation = OPERATIONS[name]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

    @seed(4)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, named=st.booleans(), keyed=st.sampled_from([True] * 7 + [False]))
    def exchange(case: schemathesis.Case, named: bool, keyed: bool) -> None:
        if named:
            case.body = real(case.body, world.ids)
            case.path_parameters = real(case.path_parameters or {}, world.ids)
            case.query = real(case.query or {}, world.ids)
        check(world, case, key=KEY if keyed else None)

    exchange()


def check(world: World, case: schemathesis.Case, key: str | None) -> Any:
    """Send a request and hold the answer against the description; None for one that has no URL."""
    kwargs = case.as_transport_kwargs(base_url="http://fake.invalid")
    kwargs = {k: v for k, v in kwargs.items() if k in REQUEST}
    try:
        prepared = requests.Request(**kwargs).prepare()
    except (requests.exceptions.RequestException, UnicodeError):
        return None  # no client could send it
    if key is not None:
        prepared.headers["X-API-Key"] = key
    body = prepared.body or b""
    body = body.encode() if isinstance(body, str) else body
    target = prepared.url.removeprefix("http://fake.invalid")
    headers = {
        k: v if isinstance(v, str) else v.decode("latin-1") for k, v in prepared.headers.items()
    }
    sent = world.send(prepared.method, target, headers, body)
    answer = {}
    for key, value in sent[0]["headers"]:
        answer.setdefault(key.decode(), []).append(value.decode())
    response = schemathesis.Response(
        status_code=sent[0]["status"],
        headers=answer,
        content=b"".join(message.get("body", b"") for message in sent[1:]),
        request=prepared,
        elapsed=0.0,
        verify=False,
    )
    if response.status_code == 501:
        # What a self-hosted server cannot mean anything by; docs/reference/refusals.md lists it.
        assert case.operation.definition.raw["operationId"] in NOT_IMPLEMENTED
    else:
        case.validate_response(response, checks=[not_a_server_error])
    case.validate_response(response, checks=CHECKS)
    if response.status_code >= 400:
        assert "content-length" in answer
        said = msgspec.json.decode(response.content)
        text = said["error"]["message"] if target.startswith("/v1/") else said["detail"]
        assert isinstance(text, str)
    return response


REQUEST = frozenset({"method", "url", "headers", "params", "data", "json", "cookies", "files"})
