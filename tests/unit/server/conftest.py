"""A fake server on virtual time, driven by raw requests as the protocol writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.server import Settings
from tinkex.server.api.identity import owner_of_key
from tinkex.testing import FakeClock, FakeEngine, FakeServer
from tinkex.transport.base import HttpRequest, Pool, Reply
from tinkex.types import Datum, ModelInput
from tinkex.wire.proto_sampling import decode_sample_response
from tinkex.wire.proto_training import decode_forward_backward_output, encode_forward_backward

if TYPE_CHECKING:
    from tinkex.testing.fake_engine import Delays

PROTOBUF = "application/x-protobuf"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def datum(tokens: list[int] = [1, 2, 3], **inputs: Any) -> Datum:  # noqa: B006
    """A datum that predicts each next token."""
    inputs.setdefault("target_tokens", [t + 1 for t in tokens])
    inputs.setdefault("weights", [1.0] * len(tokens))
    return Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@dataclass
class Api:
    """One client's view of the server."""

    server: FakeServer
    clock: FakeClock
    key: str = "tml-one"
    base_url: str = "http://fake.invalid"

    def __post_init__(self) -> None:
        self.transport = self.server.transport(self.base_url)

    @property
    def owner(self) -> str:
        """The tenant this key is."""
        return owner_of_key(self.key)

    def other(self, key: str = "tml-two") -> Api:
        """The same server with another key."""
        return Api(self.server, self.clock, key)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: str = "",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        sent = {"x-api-key": self.key, "accept": "application/json", **(headers or {})}
        request = HttpRequest(method, f"/api/v1{path}", Pool.REST, 3600, query, sent, data)
        return await self.transport.send(request)

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """A POST that must succeed, and its JSON."""
        reply = await self.call("POST", path, body if body is not None else {}, **options)
        assert reply.status == 200, reply
        return msgspec.json.decode(reply.body)

    async def get(self, path: str, **options: Any) -> Any:
        """A GET that must succeed, and its JSON."""
        reply = await self.call("GET", path, **options)
        assert reply.status == 200, reply
        return msgspec.json.decode(reply.body)

    async def poll(self, future: Any, *, binary: bool = False, metadata: bool = False) -> Reply:
        """One retrieve_future."""
        request_id = future if isinstance(future, str) else future["request_id"]
        body = {"request_id": request_id, "allow_metadata_only": metadata}
        accept = {"accept": PROTOBUF} if binary else None
        return await self.call("POST", "/retrieve_future", body, headers=accept)

    async def result(self, future: Any) -> Any:
        """The JSON result of a future that must succeed."""
        body = await self.outcome(future)
        assert "error" not in body, body
        return body

    async def outcome(self, future: Any) -> Any:
        """The JSON result of a future, or its failure."""
        while True:
            reply = await self.poll(future)
            assert reply.status == 200, reply
            body = msgspec.json.decode(reply.body)
            if body.get("type") != "try_again":
                return body

    async def session(self, **members: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **members}
        return (await self.post("/create_session", body))["session_id"]

    async def model(self, session: str | None = None, number: int = 0, **members: Any) -> str:
        """A model that exists when this returns."""
        body = {
            "session_id": session or await self.session(),
            "model_seq_id": number,
            "base_model": "tinkex/tiny",
            "lora_config": {"rank": 8},
            **members,
        }
        return (await self.result(await self.post("/create_model", body)))["model_id"]

    async def train(self, model: str, seq: int, *data: Datum, **options: Any) -> Any:
        """Submit forward_backward and give its future."""
        options.setdefault("loss_fn", "cross_entropy")
        body = encode_forward_backward(
            model_id=model, seq_id=seq, data=list(data) or [datum()], **options
        )
        return await self.post("/forward_backward", body, headers={"content-type": PROTOBUF})

    async def step(self, model: str, seq: int, **params: Any) -> Any:
        params.setdefault("learning_rate", 0.1)
        body = {"model_id": model, "seq_id": seq, "adam_params": params, "type": "optim_step"}
        return await self.post("/optim_step", body)

    async def output(self, future: Any) -> Any:
        """The result of a training future."""
        reply = await self.poll(future, binary=True)
        assert reply.headers["content-type"] == PROTOBUF, reply
        return decode_forward_backward_output(reply.body)

    async def loss(self, future: Any) -> float:
        return (await self.output(future)).metrics["loss:sum"]

    async def sampler(self, session: str, number: int = 0, **members: Any) -> str:
        if "model_path" not in members:
            members.setdefault("base_model", "tinkex/tiny")
        body = {"session_id": session, "sampling_session_seq_id": number, **members}
        return (await self.post("/create_sampling_session", body))["sampling_session_id"]

    async def sample(self, sampler: str, seq: int = 0, **members: Any) -> Any:
        """Submit a sample and give its future."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4},
            **members,
        }
        return await self.post("/asample", body)

    async def sampled(self, future: Any) -> Any:
        """The result of a sample."""
        reply = await self.poll(future, binary=True)
        assert reply.headers["content-type"] == PROTOBUF, reply
        return decode_sample_response(reply.body, future["sample_sequence_ids"])


Start = Callable[..., Any]


@pytest.fixture
def start() -> Start:
    """Make a server with other settings: `async with start(long_poll_s=5) as api`."""

    @asynccontextmanager
    async def run(delays: Delays | None = None, **settings: Any) -> AsyncIterator[Api]:
        clock = FakeClock()
        engine = FakeEngine(clock, delays=delays)
        server = FakeServer(clock=clock, engine=engine, settings=Settings(**settings))
        async with clock.running(), server:
            yield Api(server, clock)

    return run


@pytest.fixture
async def api(start: Start) -> AsyncIterator[Api]:
    async with start() as started:
        yield started
