"""Streams: the same as whole answers, in pieces, while there is somebody to read them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from tests.unit.server.conftest import Api
from tinkex.clock import time_limit
from tinkex.errors import EngineDiedError
from tinkex.testing import FakeClock, FakeEngine, FakeServer
from tinkex.testing.fake_engine import Delays

from .conftest import V1, chat, completion

if TYPE_CHECKING:
    from tests.unit.server.conftest import Start
    from tinkex.engine.protocol import OnToken, SampleOp, SampleResult

pytestmark = pytest.mark.anyio

SLOW = Delays(token_s=1.0)


@pytest.mark.parametrize("stop", [None, "e", ["\x17", "zz"]])
async def test_joined_pieces_of_a_completion_are_the_whole(v1: V1, stop: Any) -> None:
    asked = {"n": 3, "prompt": ["hello", "you"], "max_tokens": 90, "stop": stop, "logprobs": 2}
    whole = await v1.complete(**asked)
    joined: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "tokens": []})
    for event in await v1.events("/completions", **asked):
        assert event["id"].startswith("cmpl-")
        (choice,) = event["choices"]
        so_far = joined[choice["index"]]
        assert "finish_reason" not in so_far, "a piece came after the end"
        so_far["text"] += choice["text"]
        so_far["tokens"] += choice["logprobs"]["tokens"]
        if choice["finish_reason"] is not None:
            so_far["finish_reason"] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert joined[choice["index"]] == {
            "text": choice["text"],
            "tokens": choice["logprobs"]["tokens"],
            "finish_reason": choice["finish_reason"],
        }


async def test_joined_pieces_of_a_chat_are_the_whole(v1: V1) -> None:
    asked = {"n": 2, "max_tokens": 90, "logprobs": True, "top_logprobs": 2}
    whole = await v1.chat(**asked)
    joined: dict[int, dict[str, Any]] = {}
    for event in await v1.events("/chat/completions", **asked):
        assert event["object"] == "chat.completion.chunk"
        (choice,) = event["choices"]
        delta = choice["delta"]
        if "role" in delta:
            assert choice["index"] not in joined
            joined[choice["index"]] = {"content": "", "logprobs": []}
        so_far = joined[choice["index"]]
        so_far["content"] += delta.get("content", "")
        so_far["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
    for choice in whole["choices"]:
        so_far = joined[choice["index"]]
        assert so_far["content"] == choice["message"]["content"]
        assert [each["token"] for each in so_far["logprobs"]] == [
            each["token"] for each in choice["logprobs"]["content"]
        ]
        likeliest = [
            [best["token"] for best in each["top_logprobs"]] for each in so_far["logprobs"]
        ]
        assert likeliest == [
            [best["token"] for best in each["top_logprobs"]]
            for each in choice["logprobs"]["content"]
        ]


async def test_pieces_come_while_the_rest_is_drawn_and_choices_take_turns(start: Start) -> None:
    async with start(SLOW) as api:
        v1 = V1(api)
        body = completion({"stream": True, "n": 2, "max_tokens": 40})
        seen: list[tuple[float, int]] = []
        async with api.transport.stream(v1.request("POST", "/completions", body)) as reply:
            async for part in reply.chunks:
                for line in part.decode().split("\n\n"):
                    if line.startswith("data: {"):
                        event = msgspec.json.decode(line.removeprefix("data: "))
                        seen.append((api.clock.now(), event["choices"][0]["index"]))
        times = [at for at, _ in seen]
        assert times == sorted(times)
        assert times[0] < 15 < 30 < times[-1]
        order = [index for _, index in seen]
        assert order != sorted(order)


async def test_a_stream_ends_with_its_usage_when_asked(v1: V1) -> None:
    plain = await v1.events("/completions")
    assert all("usage" not in event for event in plain)
    *others, last = await v1.events("/completions", stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 21
    assert [e["choices"] for e in others] == [e["choices"] for e in plain]
    *_, last = await v1.events("/chat/completions", stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16


async def test_a_stream_can_begin_with_its_prompt(v1: V1) -> None:
    whole = await v1.complete(echo=True, max_tokens=0)
    (event,) = await v1.events("/completions", echo=True, max_tokens=0)
    assert event["choices"] == whole["choices"]
    assert event["choices"][0]["text"] == "hello"


class Line:
    """An ASGI connection that the test holds both ends of."""

    def __init__(self, v1: V1, path: str, body: dict[str, Any]) -> None:
        request = v1.request("POST", path, body)
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in request.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("fake.invalid", 80),
            "scheme": "http",
            "root_path": "",
        }
        self._body = request.body or b""
        self._given = False
        self._app = v1.api.server.app
        self.gone = anyio.Event()
        self.first = anyio.Event()
        self.sent: list[Any] = []

    async def run(self) -> None:
        await self._app(self.scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.first.set()


async def test_a_reader_who_leaves_stops_the_engine_and_pays_for_what_was_drawn(
    start: Start,
) -> None:
    async with start(SLOW) as api:
        v1 = V1(api)
        line = Line(v1, "/chat/completions", chat({"stream": True, "max_tokens": 4000}))
        async with anyio.create_task_group() as group:
            group.start_soon(line.run)
            await line.first.wait()
            line.gone.set()
        assert api.clock.now() < 100
        (entry,) = await api.server.store.usage(api.owner, 0, 1e12)
        assert 0 < entry.usage.generated_tokens < 100
        assert entry.usage.prompt_tokens == 24
        assert (await api.server.engine.stats())["samples_running"] == 0


async def test_a_caller_who_leaves_before_the_whole_answer_stops_the_engine(start: Start) -> None:
    async with start(SLOW) as api:
        line = Line(V1(api), "/completions", completion({"max_tokens": 4000}))
        async with anyio.create_task_group() as group:
            group.start_soon(line.run)
            await api.clock.sleep(5)
            line.gone.set()
        assert api.clock.now() < 100
        assert line.sent == []
        assert (await api.server.engine.stats())["samples_running"] == 0


async def test_an_engine_that_dies_before_the_first_piece_is_a_503(v1: V1) -> None:
    v1.api.server.engine.fail_next("sample", EngineDiedError("killed by signal 9"))
    status, error = await v1.refused("/completions", stream=True)
    assert status == 503
    assert error["type"] == "server_error"


class ShortLived(FakeEngine):
    """Dies after twenty seconds of a sample."""

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        async with time_limit(self._clock, 20):
            return await super().sample(op, on_token)
        raise EngineDiedError("killed by signal 9")


async def test_an_engine_that_dies_later_is_an_error_in_the_stream() -> None:
    clock = FakeClock()
    server = FakeServer(clock=clock, engine=ShortLived(clock, delays=SLOW))
    async with clock.running(), server:
        v1 = V1(Api(server, clock))
        line = Line(v1, "/completions", completion({"stream": True, "max_tokens": 400}))
        await line.run()
        text = b"".join(message.get("body", b"") for message in line.sent).decode()
        *pieces, last, nothing = text.split("\n\n")
        assert pieces
        assert nothing == ""
        error = msgspec.json.decode(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "[DONE]" not in text
        assert line.sent[-1]["more_body"] is False
