"""A server that answers from a script, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.config import Config
from tinkex.errors import APIConnectionError
from tinkex.testing.fake_clock import FakeClock
from tinkex.transport.api import connect
from tinkex.transport.base import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tinkex.transport.base import HttpRequest


def reply(value: object = None, status: int = 200, media: str = "application/json", **headers: str):
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    head = {"content-type": media, "content-length": str(len(body)), **named}
    return Reply(status, head, body)


PENDING = reply({"type": "try_again", "request_id": "r", "queue_state": "active"})
REFUSED = APIConnectionError(message="connection refused")


class Script:
    """Answers in order, the last one for ever; `held_s` is how long each is held back."""

    def __init__(self, clock: FakeClock, *answers: Any, held_s: float = 0.0) -> None:
        self.clock = clock
        self.answers = deque(answers)
        self.held_s = held_s
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []

    async def send(self, request: HttpRequest) -> Reply:
        self.requests.append(msgspec.json.decode(request.body or b"{}"))
        self.times.append(self.clock.now())
        if self.held_s:
            await self.clock.sleep(self.held_s)
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @asynccontextmanager
    async def stream(self, request: HttpRequest):
        raise NotImplementedError
        yield

    async def aclose(self) -> None: ...


class Stage:
    """A virtual clock and an api that talks to a script."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def api(self, *answers: Any, held_s: float = 0.0):
        self.script = Script(self.clock, *answers, held_s=held_s)
        config = Config(base_url="http://test", api_key="tml-test")
        return connect(config, self.script, self.clock)

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with self.clock.running():
                return await work()

        return asyncio.run(main())


@pytest.fixture
def stage() -> Stage:
    return Stage()
