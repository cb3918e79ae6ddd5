"""A sample that another node computes: the operation and its outcome arrive as they were sent."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_codecs import finite, finite32, ids_of, instances, int64, samples, tensors, text

from tinkex import types
from tinkex.engine.protocol import SampleOp, SampleResult, Weights
from tinkex.errors import InputError, RequestFailedError
from tinkex.server.cluster import sample_wire
from tinkex.server.cluster.sample_wire import (
    decode_op,
    decode_outcome,
    encode_op,
    encode_outcome,
)
from tinkex.wire.proto_sampling import encode_sample_response

counts = st.integers(0, 2**31 - 1)
ops = st.builds(
    SampleOp,
    op_id=text,
    weights=st.builds(
        Weights, base_model=text, snapshot=st.none() | text, location=st.none() | text
    ),
    prompt=instances(types.ModelInput),
    params=instances(types.SamplingParams),
    sequence_ids=st.lists(text, max_size=3).map(tuple),
    prompt_logprobs=st.booleans(),
    prompt_logprobs_last_n=st.none() | int64,
    topk_prompt_logprobs=counts,
    topk_sample_logprobs=counts,
    target_prompt_logprobs=st.none() | tensors(floats=finite32),
    prompt_alt_tokens_k=counts,
    record_stability_info=st.booleans(),
    cache_salt=text,
)
results = st.builds(
    SampleResult,
    response=samples(),
    prompt_tokens=counts,
    cached_tokens=counts,
    generated_tokens=counts,
    device_s=finite,
    version=text,
)
BARE = SampleOp(
    op_id="s:1",
    weights=Weights(base_model="m"),
    prompt=types.ModelInput.from_ints([1, 2]),
    params=types.SamplingParams(),
    sequence_ids=(),
)


def answering(result: SampleResult) -> SampleOp:
    return replace(BARE, sequence_ids=ids_of(result.response))


@given(op=ops)
def test_an_operation_arrives_as_it_was_sent(op: SampleOp):
    assert decode_op(encode_op(op)) == op


@given(result=results)
def test_a_result_arrives_as_it_was_sent(result: SampleResult):
    decoded = decode_outcome(encode_outcome(result), answering(result))
    assert isinstance(decoded, SampleResult)
    assert decoded == result
    # What a client gets does not depend on who computed it.
    assert encode_sample_response(decoded.response) == encode_sample_response(result.response)


def test_empty_arrays_stay_arrays():
    nothing = types.TopkLogprobs(np.zeros((0, 5), "i4"), np.zeros((0, 5), "f4"))
    response = types.SampleResponse(
        [types.SampledSequence("stop", "s", tokens=[], logprobs=[], topk_logprobs_np=nothing)],
        prompt_logprobs_np=np.zeros(0, "f4"),
        topk_prompt_logprobs_np=nothing,
    )
    result = SampleResult(
        response=response, prompt_tokens=0, cached_tokens=0, generated_tokens=0, device_s=0.0
    )
    decoded = decode_outcome(encode_outcome(result), answering(result))
    assert isinstance(decoded, SampleResult)
    assert decoded == result
    assert encode_sample_response(decoded.response) == encode_sample_response(response)


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
@pytest.mark.parametrize("request_id", [None, "s:1"])
def test_a_failure_arrives_with_its_kind(category: Any, request_id: str | None):
    failed = RequestFailedError("the prompt is too long", request_id, category)
    decoded = decode_outcome(encode_outcome(failed), BARE)
    assert isinstance(decoded, RequestFailedError)
    assert decoded.__dict__ == failed.__dict__


def test_no_field_of_an_operation_or_a_result_is_forgotten():
    assert [f.name for f in fields(SampleOp)] == list(sample_wire._Op.__struct_fields__)
    head = set(sample_wire._Head.__struct_fields__) | {"response"}
    assert {f.name for f in fields(SampleResult)} <= head


@given(data=st.binary(max_size=64), cut=st.integers(0, 200))
def test_what_is_no_sample_raises_an_input_error(data: bytes, cut: int):
    good = encode_outcome(RequestFailedError("no", None, "user"))
    for body in (data, good[: min(cut, len(good) - 1)]):
        with pytest.raises(InputError):
            decode_outcome(body, BARE)
        with pytest.raises(InputError):
            decode_op(body)


def test_a_result_for_another_number_of_sequences_is_refused():
    sequence = types.SampledSequence("stop", "s", tokens=[1])
    result = SampleResult(
        response=types.SampleResponse([sequence]),
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        device_s=0.0,
    )
    with pytest.raises(InputError, match="sequence ids"):
        decode_outcome(encode_outcome(result), BARE)
