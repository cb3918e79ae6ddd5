"""Good bodies for `fuzz` to start from: what official clients sent, and every kind of value."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.property import fuzz
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinkex.wire.compression import compress
from tinkex.wire.proto_sampling import encode_sample_response
from tinkex.wire.proto_training import encode_forward_backward, encode_forward_backward_output

_RECORDED = Path(__file__).parents[1] / "conformance" / "recorded"


def _datums() -> list[Datum]:
    plain = Datum(
        ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": [1.0, 0.5, -1.0], "advantages": [0.0, 1e9, 1.0]},
    )
    mixed = ModelInput(
        chunks=[
            EncodedTextChunk(tokens=[5]),
            ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3),
            DmelChunk(dmel=b"abc"),
        ]
    )
    sparse = TensorData(
        np.array([1, 2], "i8"), "int64", [2, 3], np.array([0, 1, 2], "i8"), np.array([0, 2], "i8")
    )
    rows = Datum(mixed, {"target_tokens": sparse, "weights": np.ones((2, 3), np.float32)})
    spans = [PromptProvenanceSpan(sequence_id="s:0", offset=0, length=2)]
    spans += [SampledProvenanceSpan(sequence_id="s:0", offset=0, length=1)]
    return [plain, rows, plain.with_provenance(spans, spans)]


def protobuf() -> list[bytes]:
    plain, rows, sourced = _datums()
    config = {"beta": 0.5, "loss_id": "x"}
    return [
        encode_forward_backward(
            model_id="m", seq_id=1, data=data, loss_fn="ppo", loss_fn_config=config
        )
        for data in ([plain], [rows, plain], [sourced], [plain] * 5)
    ]


def protobuf_results() -> list[bytes]:
    tensors = {"logprobs": TensorData(np.zeros(3, np.float32), "float32", [3])}
    output = ForwardBackwardOutput(
        loss_fn_output_type="x", loss_fn_outputs=[tensors, tensors], metrics={"loss:sum": 1.0}
    )
    sequence = SampledSequence(
        sequence_id="a", stop_reason="stop", tokens=[1, 2], logprobs=[-0.5, -1.0]
    )
    sample = SampleResponse(sequences=[sequence, sequence])
    return [encode_forward_backward_output(output), encode_sample_response(sample)]


def json() -> list[bytes]:
    """Recorded requests behind the number of their kind, as `fuzz.json` reads them."""
    numbers = {route.path: number for number, route in enumerate(fuzz.json_routes())}
    found: dict[str, set[bytes]] = {}
    for file in sorted(_RECORDED.glob("*.json")):
        for request in msgspec.json.decode(file.read_bytes())["requests"]:
            path, body = request["path"], request.get("body")
            if path in numbers and isinstance(body, dict):
                found.setdefault(path, set()).add(msgspec.json.encode(body))
    bodies = [
        bytes([numbers[path]]) + body
        for path, seen in found.items()
        for body in sorted(seen, key=len)[:3]
    ]
    return bodies + [bytes([250 + forward]) + _training(forward) for forward in (0, 1)]


def _training(forward: int) -> bytes:
    name = "forward_input" if forward else "forward_backward_input"
    tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"data": "aGk="}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": {"data": [0.5], "dtype": "float32"}},
    }
    batch: dict[str, Any] = {
        "data": [datum],
        "loss_fn": "cross_entropy",
        "loss_fn_config": {"a": 1},
    }
    return msgspec.json.encode({name: batch, "model_id": "m", "seq_id": 1})


def compression() -> list[bytes]:
    return [compress(b""), compress(b"abc" * 100), compress(random.Random(0).randbytes(300))]


def custom_loss() -> list[bytes]:
    """Graphs in JSON, and bytes that choose calls."""
    graph = {
        "nodes": [
            {"op": "placeholder", "name": "p", "target": "logprobs"},
            {"op": "call_function", "name": "e", "target": "torch.exp", "args": [{"ref": "p"}]},
            {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "e"}, 0]},
            {"op": "output", "name": "o", "target": "output", "args": [
                {"tuple": [{"ref": "s"}, {"dict": {"custom/a:sum": {"ref": "s"}}}]}]},
        ]
    }  # fmt: skip
    request = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "n",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph,
    }
    rng = random.Random(7)
    return [msgspec.json.encode(request), *(b"\x01" + rng.randbytes(120) for _ in range(30))]
