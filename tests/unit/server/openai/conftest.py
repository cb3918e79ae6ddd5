"""Requests to `/v1` of a fake server on virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.transport.base import HttpRequest, Pool, Reply

if TYPE_CHECKING:
    from tests.unit.server.conftest import Api

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class V1:
    """A caller of the OpenAI-compatible endpoints."""

    api: Api

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        return await self.api.transport.send(self.request(method, path, body, **headers))

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> HttpRequest:
        data = None if body is None else msgspec.json.encode(body)
        sent = headers or {"authorization": f"Bearer {self.api.key}"}
        return HttpRequest(method, f"/v1{path}", Pool.REST, 3600, "", sent, data)

    async def get(self, path: str) -> Any:
        """A GET that must succeed."""
        reply = await self.call("GET", path)
        assert reply.status == 200, reply.body
        return msgspec.json.decode(reply.body)

    async def complete(self, **members: Any) -> Any:
        """A completion that must succeed."""
        return await self._post("/completions", completion(members))

    async def chat(self, **members: Any) -> Any:
        """A chat completion that must succeed."""
        return await self._post("/chat/completions", chat(members))

    async def refused(self, path: str, **members: Any) -> tuple[int, dict[str, Any]]:
        """The status and error of a request that must fail."""
        body = (chat if "chat" in path else completion)(members)
        reply = await self.call("POST", path, body)
        assert reply.status >= 400, reply.body
        return reply.status, msgspec.json.decode(reply.body)["error"]

    async def events(self, path: str, **members: Any) -> list[Any]:
        """All events of a stream, the last one as it is."""
        body = (chat if "chat" in path else completion)({"stream": True, **members})
        async with self.api.transport.stream(self.request("POST", path, body)) as reply:
            assert reply.status == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            data = b"".join([part async for part in reply.chunks])
        lines = data.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]

    async def _post(self, path: str, body: Any) -> Any:
        reply = await self.call("POST", path, body)
        assert reply.status == 200, reply.body
        return msgspec.json.decode(reply.body)


def completion(members: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tinkex/tiny", "prompt": "hello", "seed": 1, **members}


def chat(members: dict[str, Any]) -> dict[str, Any]:
    defaults = {"model": "tinkex/tiny", "messages": HELLO, "seed": 1, "max_tokens": 16}
    return {**defaults, **members}


@pytest.fixture
def v1(api: Api) -> V1:
    return V1(api)
