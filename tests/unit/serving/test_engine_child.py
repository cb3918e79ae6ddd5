"""Bodies that are decoded in the engine's process: the same operations, the same refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.conftest import Api, datum
from tinkex.engine.protocol import EncodedTrainOp
from tinkex.errors import InputError, RequestFailedError
from tinkex.serving.engine_child import decode_train_op
from tinkex.testing import FakeClock, FakeEngine, FakeServer
from tinkex.wire.proto_training import encode_forward_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.protocol import TrainOp

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def encoded(body: bytes, **options: Any) -> EncodedTrainOp:
    return EncodedTrainOp(op_id="m:1", model_id="m", body=body, **options)


class DecodingEngine(FakeEngine):
    """Takes bodies as the engine's process of a server does, and notes how they came."""

    takes_bodies = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.got: list[object] = []

    async def train(self, batch: Sequence[Any]) -> Any:
        self.got += batch
        ops: list[TrainOp] = []
        for op in batch:
            try:
                ops.append(decode_train_op(op) if isinstance(op, EncodedTrainOp) else op)
            except InputError as error:
                return [RequestFailedError(str(error), op.op_id, "user")]
        return await super().train(ops)


def test_a_body_becomes_the_operation_it_was_made_of():
    data = [datum([1, 2, 3]), datum([4, 5])]
    body = encode_forward_backward(
        model_id="m", seq_id=1, data=data, loss_fn="ppo", loss_fn_config={"clip": 0.5}
    )
    op = decode_train_op(encoded(body, backward=False))
    assert (op.op_id, op.model_id, op.backward, op.custom_loss) == ("m:1", "m", False, None)
    assert (op.loss_fn, op.loss_fn_config, list(op.data)) == ("ppo", {"clip": 0.5}, data)


def test_a_body_that_is_no_batch_is_refused():
    with pytest.raises(InputError, match="not a valid ForwardBackwardRequest"):
        decode_train_op(encoded(b"\xff"))


async def outcomes(engine: FakeEngine, clock: FakeClock) -> list[Any]:
    """What a client gets for a good batch, and for one whose tensors do not fit."""
    async with clock.running(), FakeServer(clock=clock, engine=engine) as server:
        api = Api(server, clock)
        model = await api.model(session=await api.session())
        good = await api.outcome(await api.train(model, 1))
        body = bytearray(
            encode_forward_backward(
                model_id=model, seq_id=2, data=[datum()], loss_fn="cross_entropy"
            )
        )
        body[bytes(body).rindex(b"\x22\x01\x03") + 2] = 2
        headers = {"content-type": "application/x-protobuf"}
        bad = await api.outcome(await api.post("/forward_backward", bytes(body), headers=headers))
        return [good["metrics"], bad["error"], bad["category"]]


async def test_a_client_cannot_tell_where_its_body_was_decoded() -> None:
    here, there = FakeClock(), FakeClock()
    engine = DecodingEngine(clock=there)
    assert await outcomes(engine, there) == await outcomes(FakeEngine(here), here)
    assert [type(op) for op in engine.got] == [EncodedTrainOp] * 2


async def test_a_batch_with_an_uploaded_loss_is_decoded_where_that_is_looked_up() -> None:
    clock = FakeClock()
    engine = DecodingEngine(clock=clock)
    async with clock.running(), FakeServer(clock=clock, engine=engine) as server:
        api = Api(server, clock)
        config = {"loss_id": "none"}
        train = api.train(await api.model(), 1, loss_fn="custom", loss_fn_config=config)
        assert "names no uploaded loss" in (await api.outcome(await train))["error"]
    assert engine.got == []
