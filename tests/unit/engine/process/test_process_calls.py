"""Both halves of the conversation without a process: calls here, `FakeEngine` over there."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from contextlib import asynccontextmanager
from socket import socketpair
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.contracts.engine_suite import base, optim_op, sample_op, spec, train_op
from tinkex.engine.process.calls import METHODS, CallRunner, Calls
from tinkex.engine.process.messages import (
    HEADER,
    Beat,
    CallMessage,
    CallReply,
    Cancel,
    Tokens,
    open_channel,
)
from tinkex.engine.protocol import EncodedTrainOp, Engine
from tinkex.errors import ClosedError, InputError, RequestFailedError
from tinkex.testing import Delays, FakeClock, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinkex.engine.process.calls import Decode
    from tinkex.engine.process.messages import Channel, Message
    from tinkex.engine.protocol import TrainOp

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Pair:
    """A caller and an engine that hand each other messages directly."""

    def __init__(self, engine: Engine, decode: Decode | None = None) -> None:
        self.sent: list[Message] = []
        self.fatal: list[BaseException] = []
        self.calls = Calls(self._there)
        self._answering = CallRunner(engine, self._back, self.fatal.append, decode)

    def _there(self, message: Message) -> None:
        self.sent.append(message)
        assert isinstance(message, CallMessage | Cancel)
        self._answering.take(message)

    def _back(self, message: Message) -> None:
        self.sent.append(message)
        assert isinstance(message, CallReply | Tokens)
        self.calls.take(message)


def test_every_asynchronous_method_of_the_protocol_can_be_called():
    own = {name for name in vars(Engine) if not name.startswith("_")}
    assert own - {"models"} == METHODS


async def test_an_answer_comes_back_to_its_own_caller() -> None:
    pair = Pair(FakeEngine())
    await pair.calls.call("create_adapter", spec=spec("m"))
    trained, stepped, sampled = await asyncio.gather(
        pair.calls.call("train", batch=[train_op("m", backward=False)]),
        pair.calls.call("optim_step", batch=[optim_op("m")]),
        pair.calls.call("sample", op=sample_op(base())),
    )
    assert trained[0].output.metrics["loss:sum"] > 0
    assert stepped[0].metrics["step"] == 1
    assert sampled.generated_tokens == 6


async def test_calls_start_in_the_order_they_were_made() -> None:
    engine = FakeEngine()
    pair = Pair(engine)
    await pair.calls.call("create_adapter", spec=spec("m"))
    await asyncio.gather(
        *(pair.calls.call("train", batch=[train_op("m", op_id=str(i))]) for i in range(5))
    )
    assert [call.ids for call in engine.calls[1:]] == [(str(i),) for i in range(5)]


async def test_tokens_of_one_turn_of_the_loop_travel_together_and_before_the_answer() -> None:
    pair = Pair(FakeEngine())
    heard: list[int] = []
    result = await pair.calls.call(
        "sample",
        op=sample_op(base(), samples=3),
        on_token=lambda _, token, *__: heard.append(token),
    )
    assert len(heard) == result.generated_tokens == 18
    kinds = [type(message) for message in pair.sent]
    assert kinds == [CallMessage, Tokens, CallReply]


async def test_a_caller_that_fails_on_a_token_still_gets_its_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("mine")

    result = await Pair(FakeEngine()).calls.call("sample", op=sample_op(base()), on_token=fails)
    assert result.generated_tokens == 6
    assert caplog.text.count("on_token failed") == 1


async def test_cancelling_a_call_cancels_it_over_there() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock, delays=Delays(sample_s=3600.0))
    pair = Pair(engine)
    waiting = asyncio.ensure_future(pair.calls.call("sample", op=sample_op(base())))
    await anyio.wait_all_tasks_blocked()
    assert clock.sleepers == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await anyio.wait_all_tasks_blocked()
    assert clock.sleepers == 0
    assert [type(message) for message in pair.sent] == [CallMessage, Cancel]


async def test_when_the_other_side_is_gone_every_caller_is_told() -> None:
    pair = Pair(FakeEngine(FakeClock(), delays=Delays(sample_s=3600.0)))
    calls = [
        asyncio.ensure_future(pair.calls.call("sample", op=sample_op(base()))) for _ in range(3)
    ]
    await anyio.wait_all_tasks_blocked()
    pair.calls.fail(lambda: ClosedError("gone"))
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in errors] == ["gone"] * 3
    assert len({id(error) for error in errors}) == 3


async def test_what_cannot_be_sent_fails_for_the_caller_alone() -> None:
    ours, theirs = socketpair()
    with theirs:
        channel = await open_channel(ours, lambda _: None, lambda _: None)
        with pytest.raises(InputError, match=r"publish: holds something that cannot be sent"):
            await Calls(channel.send).call("publish", model_id=object())
        channel.abort()


@pytest.mark.parametrize(
    ("error", "category", "said"),
    [
        (RequestFailedError("bad op", None, "user"), "user", "bad op"),
        (MemoryError("no more"), "server", "ran out of memory: no more"),
        (RuntimeError("CUDA out of memory. Tried 9 GiB"), "server", "ran out of memory: CUDA"),
        (RuntimeError("CUDA error: out of memory"), "server", "ran out of memory"),
        (KeyError("x"), "server", "KeyError: 'x'"),
    ],
)
async def test_a_failed_call_fails_alone_and_says_why(
    error: Exception, category: str, said: str
) -> None:
    engine = FakeEngine()
    engine.fail_next("sample", error)
    pair = Pair(engine)
    with pytest.raises(RequestFailedError) as caught:
        await pair.calls.call("sample", op=sample_op(base()))
    assert said in caught.value.message
    assert caught.value.category == category
    assert (await pair.calls.call("sample", op=sample_op(base()))).generated_tokens == 6
    assert pair.fatal == []


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ],
)
async def test_a_fault_of_the_device_is_the_end_of_the_engine(text: str) -> None:
    engine = FakeEngine()
    pair = Pair(engine)
    engine.fail_next("train", RuntimeError(text))
    with pytest.raises(RequestFailedError, match=text):
        await pair.calls.call("train", batch=[train_op("m")])
    assert [str(error) for error in pair.fatal] == [text]


async def test_a_fault_inside_a_batch_is_found_by_its_cause() -> None:
    class Faulty(FakeEngine):
        async def train(self, batch: Any) -> Any:
            failure = RequestFailedError("the device failed", None, "server")
            failure.__cause__ = RuntimeError("CUDA error: unspecified launch failure")
            return [failure, *await super().train(batch[1:])]

    engine = Faulty()
    await engine.create_adapter(spec("m"))
    pair = Pair(engine)
    wrong, right = await pair.calls.call("train", batch=[train_op("m"), train_op("m")])
    assert isinstance(wrong, RequestFailedError)
    assert right.tokens > 0
    assert len(pair.fatal) == 1


async def test_a_users_text_is_no_fault_of_the_device() -> None:
    pair = Pair(FakeEngine())
    await pair.calls.call("create_adapter", spec=spec("m"))
    (answer,) = await pair.calls.call("train", batch=[train_op("m", loss_fn="CUDA error")])
    assert "CUDA error" in answer.message
    assert pair.fatal == []


async def test_bodies_are_decoded_at_the_engine_and_a_bad_one_fails_alone() -> None:
    def decode(op: EncodedTrainOp) -> TrainOp:
        if op.body == b"bad":
            raise InputError("is no datum", "data[0]")
        if op.body == b"surprise":
            raise KeyError("surprise")
        return train_op(op.model_id, op_id=op.op_id, backward=op.backward)

    engine = FakeEngine()
    await engine.create_adapter(spec("m"))
    pair = Pair(engine, decode)
    batch = [
        EncodedTrainOp(op_id=body.decode(), model_id="m", body=body, backward=False)
        for body in (b"bad", b"good", b"surprise")
    ]
    bad, good, surprise = await pair.calls.call("train", batch=batch)
    assert (bad.message, bad.category) == (str(InputError("is no datum", "data[0]")), "user")
    assert good.tokens > 0
    assert (surprise.message, surprise.category) == ("KeyError: 'surprise'", "server")
    (alone,) = await pair.calls.call("train", batch=batch[:1])
    assert alone.category == "user"


async def test_a_method_that_is_not_the_protocols_is_refused() -> None:
    with pytest.raises(InputError, match="'_adapter'"):
        await Pair(FakeEngine()).calls.call("_adapter", model_id="m")


# -- the channel ------------------------------------------------------------------------------


class End:
    """One end of a socket pair and what it got."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.bell = asyncio.Event()
        self.channel: Channel

    def take(self, message: Message) -> None:
        self.got.append(message)
        self.bell.set()


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[End, End]]:
    made: list[End] = []
    for sock in socketpair():
        end = End()
        end.channel = await open_channel(sock, end.take, end.lost.set_result)
        made.append(end)
    yield made[0], made[1]
    for end in made:
        end.channel.abort()
    await asyncio.gather(*(end.lost for end in made))


async def test_large_messages_cross_both_ways_at_once_and_count_as_signs_of_life() -> None:
    large = CallReply(1, {"file": bytes(range(256)) * 100_000})
    async with ends() as (one, two):
        one.channel.heard()
        assert not one.channel.heard()
        for end in (one, two):
            end.channel.send(large)
            end.channel.send(Beat())
        await asyncio.gather(one.channel.drained(), two.channel.drained())
        while len(one.got) < 2 or len(two.got) < 2:
            one.bell.clear()
            two.bell.clear()
            await asyncio.wait(
                [asyncio.ensure_future(end.bell.wait()) for end in (one, two)],
                return_when=asyncio.FIRST_COMPLETED,
            )
        assert one.got == two.got == [large, Beat()]
        assert one.channel.heard()
        one.bell.set()
        two.bell.set()


async def test_the_end_of_the_other_side_is_noticed() -> None:
    async with ends() as (one, two):
        one.channel.abort()
        assert await two.lost is None
        two.channel.send(Beat())
        await two.channel.drained()


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (HEADER.pack(4) + b"junk", pickle.UnpicklingError),
        (HEADER.pack(0), EOFError),
        (HEADER.pack(2**62), MemoryError),
    ],
    ids=["junk", "empty", "endless"],
)
async def test_bytes_that_are_no_message_end_the_connection_with_the_reason(
    sent: bytes, kind: type[Exception]
) -> None:
    ours, theirs = socketpair()
    with theirs:
        end = End()
        end.channel = await open_channel(ours, end.take, end.lost.set_result)
        theirs.sendall(sent)
        assert isinstance(await end.lost, kind)


# -- what it costs to import ------------------------------------------------------------------


def test_the_api_process_never_imports_torch():
    code = "import sys, tinkex.engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
