"""Messages between the processes: what may cross, and that it arrives as it was."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tinkex.engine.process import EngineSpec, ModelSource
from tinkex.engine.process.messages import (
    HEADER,
    Beat,
    Broken,
    CallMessage,
    CallReply,
    Cancel,
    EngineReady,
    Logged,
    Phase,
    Start,
    Stop,
    Tokens,
    decode,
    encode,
)
from tinkex.engine.protocol import (
    AdapterSpec,
    CustomLoss,
    ModelSpec,
    OptimOp,
    SampleOp,
    SampleResult,
    TrainOp,
    TrainResult,
    Weights,
)
from tinkex.errors import InputError, ModelError, RequestFailedError
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    CustomLossGraph,
    CustomLossInput,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)

if TYPE_CHECKING:
    from tinkex.engine.process.messages import Message

SPARSE = TensorData([1.0, 2.0], "float32", [2, 3], [0, 1, 2], [0, 2])
TRAIN = TrainOp(
    op_id="t",
    model_id="m",
    data=[
        Datum(
            ModelInput.from_ints([1, 2]),
            {"target_tokens": [[2, 3, 4], [3, 4, 5]], "weights": SPARSE},
        )
    ],
    loss_fn="ppo",
    loss_fn_config={"clip_low_threshold": 0.5, "kind": "x"},
    custom_loss=CustomLoss(
        inputs=[CustomLossInput(name="logprobs", rank=1)], graph=CustomLossGraph(nodes=[])
    ),
)
SAMPLE = SampleOp(
    op_id="s",
    weights=Weights(base_model="b", snapshot="x"),
    prompt=ModelInput.from_ints(range(300)),
    params=SamplingParams(max_tokens=3, stop=["a"], seed=2),
    sequence_ids=["q"],
    target_prompt_logprobs=TensorData.from_numpy(np.zeros((4, 2), np.int64)),
    cache_salt="owner",
)
TRAINED = TrainResult(
    output=ForwardBackwardOutput(
        "ArrayRecord",
        [{"logprobs": TensorData.from_numpy(np.arange(3, dtype=np.float32))}],
        {"loss:sum": 1.5},
    ),
    tokens=3,
    device_s=0.5,
)
SAMPLED = SampleResult(
    response=SampleResponse(
        sequences=[
            SampledSequence(
                stop_reason="stop",
                sequence_id="q",
                tokens_np=np.array([1, 2], np.int32),
                logprobs_np=np.array([-1.0, -2.0], np.float32),
                topk_logprobs_np=TopkLogprobs(np.ones((2, 1), np.int32), np.zeros((2, 1))),
            )
        ],
        # A slice of a matrix: not one block of memory.
        prompt_logprobs_np=np.ones((4, 2), np.float32)[:, 0],
    ),
    prompt_tokens=4,
    cached_tokens=0,
    generated_tokens=2,
    device_s=0.1,
)
ADAPTER = AdapterSpec(
    model_id="m", base_model="b", lora=LoraConfig(rank=3), optimizer=AdamOptimizerConfig()
)
SPEC = EngineSpec(models=(ModelSource("tinkex/tiny", "t"),), folder=Path("/somewhere"))
MESSAGES: list[Message] = [
    Start(SPEC, 0.25, 30),
    CallMessage(1, "train", {"batch": [TRAIN]}),
    CallMessage(2, "sample", {"op": SAMPLE}, streams=True),
    CallMessage(3, "create_adapter", {"spec": ADAPTER}),
    CallMessage(
        4, "optim_step", {"batch": [OptimOp(op_id="o", model_id="m", params=AdamParams())]}
    ),
    CallMessage(5, "save_adapter", {"model_id": "m", "location": "there", "optimizer": True}),
    Cancel(1),
    Stop(),
    Phase("loading"),
    EngineReady([ModelSpec(name="b", max_context_length=8, vocab_size=9)]),
    CallReply(1, [TRAINED]),
    CallReply(2, SAMPLED),
    CallReply(3, {"adapter_config.json": b"{}"}),
    Tokens([(2, 0, 17, -0.5, ([17, 3], [-0.5, -1.5]))]),
    Beat(),
    Logged(30, "tinkex.engine", "careful"),
]


def body(message: Message) -> bytes:
    framed = bytes(encode(message))
    assert HEADER.unpack(framed[: HEADER.size]) == (len(framed) - HEADER.size,)
    return framed[HEADER.size :]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message):
    assert decode(body(message)) == message


@pytest.mark.parametrize(
    "error",
    [
        RequestFailedError("no", "r-1", "user"),
        InputError("is wrong", "data[3]"),
        ModelError("a file is broken"),
    ],
)
def test_an_error_arrives_with_its_type_and_fields(error: Any):
    for message in (CallReply(1, error=error), CallReply(1, [error]), Broken(error)):
        arrived: Any = decode(body(message))
        found = getattr(arrived, "error", None) or arrived.value[0]
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert found.__dict__ == error.__dict__


class Planted:
    """Unpickling this would run a command."""

    def __reduce__(self) -> Any:
        return (os.system, ("exit 1",))


@pytest.mark.parametrize(
    "value", [Planted(), os.system, np.array([Planted()]), SAMPLED.__class__.__init__, object()]
)
def test_nothing_but_known_values_can_be_sent(value: Any):
    with pytest.raises(pickle.PicklingError, match="has no place in a message"):
        encode(CallReply(1, value))


@pytest.mark.parametrize(
    "planted",
    [
        pickle.dumps(Planted()),
        pickle.dumps(os.system),
        pickle.dumps(getattr),
        pickle.dumps(np.load),
        # A function and an attribute of modules whose classes are allowed.
        b"ctinkex.errors\nstatus_error\n.",
        b"\x80\x04\x8c\x0dtinkex.errors\x8c\x20TinkerError.__init__.__globals__\x93.",
    ],
    ids=["command", "function", "getattr", "numpy", "own function", "attribute"],
)
def test_reading_makes_no_other_class_and_runs_no_function(planted: bytes):
    with pytest.raises(pickle.UnpicklingError, match="has no place in a message"):
        decode(planted)


def test_a_value_that_is_no_message_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="dict is not a message"):
        decode(pickle.dumps({}))
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        decode(body(Beat())[:-3])


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"models": ()}, "models"),
        ({"dtype": "int8"}, "dtype"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_bad_spec_is_refused_before_anything_starts(change: dict[str, Any], path: str):
    with pytest.raises(InputError) as caught:
        replace(SPEC, **change)
    assert caught.value.path == path
