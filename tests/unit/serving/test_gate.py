"""What a server answers before it can work, and when it does not any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from tinkex.errors import ModelError, TinkerError
from tinkex.serving.web import Gate
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import MutableMapping

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine:
    """As much of an engine as a gate looks at."""

    def __init__(self) -> None:
        self.generation = 0
        self.phase = "loading tinkex/tiny on cpu"
        self.problem: TinkerError | None = None
        self.settled = anyio.Event()

    def become_ready(self) -> None:
        self.generation = 1
        self.settled.set()

    def fail(self, problem: TinkerError) -> None:
        self.problem = problem
        self.settled.set()

    async def wait_ready(self) -> None:
        await self.settled.wait()
        if self.problem is not None:
            raise self.problem


class Answers:
    """Calls the gate and reads what it sends."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine: Any = Engine()
        self.gate = Gate(self._app, self.engine, self.clock)

    async def get(self, path: str = "/api/v1/create_session") -> tuple[int, str, dict[Any, Any]]:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self.gate({"type": "http", "path": path}, anyio.sleep_forever, send)
        start, body = sent
        assert start["status"] == 200 or msgspec.json.decode(body["body"])["detail"]
        return start["status"], body["body"].decode(), dict(start["headers"])

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"from the app"})


async def test_a_request_waits_for_the_engine_and_goes_on_the_moment_it_is_ready():
    answers = Answers()

    async def become_ready() -> None:
        await answers.clock.sleep(5)
        answers.engine.become_ready()

    async with answers.clock.running(), anyio.create_task_group() as group:
        group.start_soon(become_ready)
        assert (await answers.get())[:2] == (200, "from the app")
    assert answers.clock.now() == 5


async def test_a_request_that_waited_long_is_told_what_goes_on_and_to_come_back():
    answers = Answers()
    async with answers.clock.running():
        status, body, headers = await answers.get()
    assert status == 503
    assert "starting: loading tinkex/tiny on cpu" in body
    assert headers[b"retry-after"] == b"1"
    assert answers.clock.now() == 20


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/api/v1/healthz"])
async def test_operators_are_always_let_through(path: str):
    answers = Answers()
    assert (await answers.get(path))[0] == 200
    answers.gate.close()
    assert (await answers.get(path))[0] == 200


async def test_an_engine_that_cannot_start_is_told_without_places():
    answers = Answers()
    answers.engine.fail(ModelError("mine: /srv/models/mine/config.json is broken"))
    async with answers.clock.running():
        status, body, _ = await answers.get()
    assert status == 503
    assert "cannot be started: mine: (a file) is broken" in body


async def test_a_server_that_ends_lets_nobody_in():
    answers = Answers()
    answers.engine.become_ready()
    assert (await answers.get())[0] == 200
    answers.gate.close()
    status, body, _ = await answers.get()
    assert status == 503
    assert "shutting down" in body
