"""Sample and training results as JSON, for readers that do not take protobuf.

Clients before 0.18 (samples) and 0.19 (training) know only this form.
"""

# Without `from __future__ import annotations`: msgspec resolves these annotations.
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from tinkex.errors import InputError
from tinkex.types import (
    ForwardBackwardOutput,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire import json_codec
from tinkex.wire.values import construct

# What the arrays behind the public types can hold.
TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
# A number, or the name of one that JSON does not have.
Number = float | Literal["NaN", "Infinity", "-Infinity"]
TopkRows = list[list[tuple[TokenId, Number]] | None]


class _Sequence(msgspec.Struct):
    stop_reason: StopReason
    tokens: list[TokenId]
    logprobs: list[Number] | None = None
    topk_logprobs: TopkRows | None = None


class _Sample(msgspec.Struct):
    sequences: list[_Sequence]
    prompt_logprobs: list[Number | None] | None = None
    topk_prompt_logprobs: TopkRows | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0


class _Output(msgspec.Struct):
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, Number]


def write_sample_response(response: SampleResponse) -> dict[str, Any]:
    """The JSON object of a sample; positions that were not computed are null."""
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [_write_sequence(sequence) for sequence in response.sequences],
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    }
    if response.prompt_logprobs is not None:
        body["prompt_logprobs"] = _write_numbers(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        body["topk_prompt_logprobs"] = _write_topk(response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        body["target_prompt_logprobs"] = response.target_prompt_logprobs
    return body


def read_sample_response(body: dict[str, Any], sequence_ids: Sequence[str]) -> SampleResponse:
    """A sample from its JSON object."""
    sample = json_codec.convert(_Sample, body)
    if len(sample.sequences) != len(sequence_ids):
        raise InputError(
            f"{len(sample.sequences)} sequences for {len(sequence_ids)} sequence ids", "sequences"
        )
    return construct(
        "",
        SampleResponse,
        sequences=[
            _read_sequence(sequence, sequence_id, f"sequences[{index}]")
            for index, (sequence, sequence_id) in enumerate(
                zip(sample.sequences, sequence_ids, strict=True)
            )
        ],
        prompt_logprobs_np=_array(sample.prompt_logprobs, "f4"),
        topk_prompt_logprobs_np=_read_topk(sample.topk_prompt_logprobs),
        target_prompt_logprobs=sample.target_prompt_logprobs,
        prompt_cache_hit_tokens=sample.prompt_cache_hit_tokens,
    )


def write_forward_backward_output(output: ForwardBackwardOutput) -> dict[str, Any]:
    """The JSON object of a training result."""
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": output.loss_fn_outputs,
        "metrics": {
            name: json_codec.number_to_json(value) for name, value in output.metrics.items()
        },
    }


def read_forward_backward_output(body: dict[str, Any]) -> ForwardBackwardOutput:
    """A training result from its JSON object."""
    output = json_codec.convert(_Output, body)
    metrics = {name: json_codec.number_from_json(value) for name, value in output.metrics.items()}
    return ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type,
        loss_fn_outputs=output.loss_fn_outputs,
        metrics=metrics,
    )


def _write_sequence(sequence: SampledSequence) -> dict[str, Any]:
    body: dict[str, Any] = {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens}
    if sequence.logprobs is not None:
        body["logprobs"] = _write_numbers(sequence.logprobs)
    if sequence.topk_logprobs is not None:
        body["topk_logprobs"] = _write_topk(sequence.topk_logprobs)
    return body


def _read_sequence(sequence: _Sequence, sequence_id: str, path: str) -> SampledSequence:
    if sequence.logprobs is not None and len(sequence.logprobs) != len(sequence.tokens):
        raise InputError(
            f"{len(sequence.logprobs)} values for {len(sequence.tokens)} tokens",
            f"{path}.logprobs",
        )
    return construct(
        path,
        SampledSequence,
        stop_reason=sequence.stop_reason,
        sequence_id=sequence_id,
        tokens_np=_array(sequence.tokens, "i4"),
        logprobs_np=_array(sequence.logprobs, "f4"),
        topk_logprobs_np=_read_topk(sequence.topk_logprobs),
    )


def _write_numbers(values: Sequence[float | None]) -> list[float | str | None]:
    return [None if value is None else json_codec.number_to_json(value) for value in values]


def _write_topk(rows: Sequence[Sequence[tuple[int, float]] | None]) -> list[Any]:
    return [
        None if row is None else [(token, json_codec.number_to_json(value)) for token, value in row]
        for row in rows
    ]


def _array(values: Sequence[Number | None] | None, dtype: str) -> Any:
    import numpy as np

    if values is None:
        return None
    return np.array([json_codec.number_from_json(value) for value in values], dtype)


def _read_topk(rows: TopkRows | None) -> TopkLogprobs | None:
    if not rows:
        return None
    return TopkLogprobs.from_lists(
        [
            None
            if row is None
            else [(token, json_codec.number_from_json(value)) for token, value in row]
            for row in rows
        ]
    )
