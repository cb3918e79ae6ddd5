"""Bodies made to break the reader end in an InputError, quickly and without much memory."""

import random

import numpy as np
import pytest

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto_training import (
    decode_forward_backward,
    decode_forward_backward_output,
    encode_forward_backward,
    encode_forward_backward_output,
)

HUGE = 2**62


def ints(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def dense(data: bytes = b"\0" * 8, dtype: int = pb.DTYPE_FLOAT32, shape: tuple = (2,)) -> pb.Tensor:
    return pb.Tensor(dense=data, dtype=dtype, shape=shape)


def csr(
    values: bytes = b"\0" * 4,
    crow: bytes = ints(0, 1),
    col: bytes = ints(0),
    shape: tuple = (1, 1),
    dtype: int = pb.DTYPE_FLOAT32,
) -> pb.Tensor:
    parts = pb.SparseCsr(values=values, crow_indices=crow, col_indices=col)
    return pb.Tensor(sparse_csr=parts, dtype=dtype, shape=shape)


TENSORS = {
    "no-values": pb.Tensor(dtype=pb.DTYPE_INT64),
    "no-dtype": dense(dtype=pb.DTYPE_UNSPECIFIED),
    "unknown-dtype": dense(dtype=77),
    "half-a-number": dense(b"\0" * 7),
    "wrong-size": dense(shape=(3,)),
    "negative-shape": dense(shape=(-2, -1)),
    "minus-one": dense(shape=(-1,)),
    "huge-shape": dense(shape=(HUGE, HUGE)),
    "empty-giant": dense(b"", shape=(0, HUGE, HUGE)),
    "many-dimensions": dense(b"\0" * 4, shape=(1,) * 100),
    "csr-1d": csr(shape=(1,)),
    "csr-3d": csr(shape=(1, 1, 1)),
    "csr-negative": csr(shape=(-1, 1)),
    "csr-giant": csr(crow=ints(0, 0), values=b"", col=b"", shape=(1, HUGE)),
    "csr-giant-rows": csr(shape=(HUGE, 1)),
    "csr-column-out-of-range": csr(col=ints(1)),
    "csr-negative-column": csr(col=ints(-1)),
    "csr-row-pointers-shrink": csr(crow=ints(0, 5, 1), shape=(2, 9)),
    "csr-row-pointers-past-the-end": csr(crow=ints(0, 2)),
    "csr-row-pointers-start-late": csr(crow=ints(1, 1)),
    "csr-no-row-pointers": csr(crow=b""),
    "csr-too-few-columns": csr(col=b""),
    "csr-half-an-index": csr(crow=ints(0, 1)[:-1]),
    "csr-no-dtype": csr(dtype=0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_hostile_tensor_in_a_request_is_an_error_that_names_it(name: str):
    message = pb.ForwardBackwardRequest()
    message.data.add()
    message.data.add().loss_fn_inputs["weights"].CopyFrom(TENSORS[name])
    with pytest.raises(InputError) as caught:
        decode_forward_backward(message.SerializeToString())
    assert caught.value.path.startswith('data[1].loss_fn_inputs["weights"]')


@pytest.mark.parametrize("name", TENSORS)
def test_a_hostile_tensor_in_a_sample_is_an_error_that_names_it(name: str):
    message = pb.SampleResponse(target_prompt_logprobs=TENSORS[name])
    with pytest.raises(InputError) as caught:
        decode_sample_response(message.SerializeToString(), [])
    assert caught.value.path.startswith("target_prompt_logprobs")


def chunk(**fields: object) -> pb.Chunk:
    return pb.Chunk(**fields)


CHUNKS = {
    "no-kind": chunk(),
    "half-a-token": chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\0\0\0")),
    "negative-token": chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\xff\xff\xff\xff")),
    "unknown-format": chunk(image=pb.ImageChunk(data=b"x", format="exe")),
    "negative-length": chunk(image=pb.ImageChunk(format="png", expected_tokens=-1)),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_hostile_chunk_is_an_error_that_names_it(name: str):
    message = pb.ForwardBackwardRequest()
    message.data.add().model_input.append(CHUNKS[name])
    with pytest.raises(InputError) as caught:
        decode_forward_backward(message.SerializeToString())
    assert caught.value.path.startswith("data[0].model_input.chunks[0]")


@pytest.mark.parametrize(
    "span",
    [
        pb.ProvenanceSpan(),
        pb.ProvenanceSpan(prompt_tokens=pb.PromptProvenanceSpan(length=1)),
        pb.ProvenanceSpan(
            sampled_tokens=pb.SampledProvenanceSpan(sequence_id="a", offset=-1, length=1)
        ),
    ],
    ids=["no-kind", "no-id", "negative"],
)
def test_a_hostile_span_is_an_error_that_names_it(span: pb.ProvenanceSpan):
    message = pb.ForwardBackwardRequest()
    datum = message.data.add()
    datum.model_input_spans.append(span)
    datum.loss_fn_input_spans.append(span)
    with pytest.raises(InputError) as caught:
        decode_forward_backward(message.SerializeToString())
    assert caught.value.path.startswith("data[0].model_input_spans[0]")


def test_a_loss_setting_without_a_value_is_an_error_that_names_it():
    message = pb.ForwardBackwardRequest()
    message.loss_fn_config_v2["beta"].SetInParent()
    with pytest.raises(InputError, match="beta"):
        decode_forward_backward(message.SerializeToString())


def batched(
    offsets: bytes = ints(0, 8),
    data: bytes = b"\0" * 8,
    dtype: int = pb.DTYPE_FLOAT32,
    trailing: tuple = (),
) -> pb.BatchedTensor:
    return pb.BatchedTensor(data=data, offsets=offsets, dtype=dtype, trailing_shape=trailing)


FIELDS = {
    "no-offsets": batched(b""),
    "half-an-offset": batched(b"\0" * 12),
    "past-the-end": batched(ints(0, 12)),
    "far-past-the-end": batched(ints(0, HUGE)),
    "negative": batched(ints(0, -4, 8)),
    "starts-late": batched(ints(4, 8)),
    "shrinking": batched(ints(0, 8, 4)),
    "inside-a-number": batched(ints(0, 2, 8)),
    "no-dtype": batched(dtype=0),
    "unknown-dtype": batched(dtype=9),
    "half-a-number": batched(data=b"\0" * 9),
    "no-whole-row": batched(trailing=(3,)),
    "negative-row": batched(trailing=(-2,)),
    "huge-row": batched(trailing=(HUGE, HUGE)),
    "empty-row": batched(trailing=(0,)),
    "many-dimensions": batched(trailing=(1,) * 100),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_hostile_training_result_is_an_error_that_names_the_field(name: str):
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=1).fields["x"].CopyFrom(FIELDS[name])
    with pytest.raises(InputError) as caught:
        decode_forward_backward_output(message.SerializeToString())
    assert caught.value.path.startswith('loss_fn_outputs[0].fields["x"]')


@pytest.mark.parametrize("count", [2, HUGE, -1])
def test_more_datums_than_values_are_refused(count: int):
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=count).fields["x"].CopyFrom(batched())
    with pytest.raises(InputError, match="datums"):
        decode_forward_backward_output(message.SerializeToString())


@pytest.mark.parametrize("count", [HUGE, -1])
def test_a_number_of_datums_without_values_is_bounded(count: int):
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=count)
    with pytest.raises(InputError, match="num_datums"):
        decode_forward_backward_output(message.SerializeToString())


def test_records_with_different_fields_are_refused():
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=1).fields["x"].CopyFrom(batched())
    message.loss_fn_outputs.add(num_datums=1).fields["y"].CopyFrom(batched())
    with pytest.raises(InputError, match=r"loss_fn_outputs\[1\]"):
        decode_forward_backward_output(message.SerializeToString())


def sequence(**fields: object) -> pb.SampleResponse:
    return pb.SampleResponse(sequences=[pb.SampledSequence(**fields)])


SAMPLES = {
    "unknown-stop-reason": (sequence(stop_reason=2), "sequences[0]"),
    "half-a-token": (sequence(tokens=b"\0"), "sequences[0].tokens"),
    "half-a-logprob": (sequence(tokens=b"\0" * 4, logprobs=b"\0"), "sequences[0].logprobs"),
    "missing-logprobs": (
        sequence(tokens=b"\0" * 8, logprobs=b"\0" * 4),
        "sequences[0].logprobs",
    ),
    "huge-topk": (
        sequence(topk_sampled_logprobs=pb.TopkLogprobs(k=2**32 - 1, length=2**32 - 1)),
        "sequences[0].topk_sampled_logprobs",
    ),
    "short-topk": (
        sequence(
            topk_sampled_logprobs=pb.TopkLogprobs(
                k=2, length=1, token_ids=b"\0" * 8, logprobs=b"\0" * 4
            )
        ),
        "sequences[0].topk_sampled_logprobs",
    ),
    "negative-cache-hits": (
        pb.SampleResponse(
            sequences=[pb.SampledSequence()], prompt_cache_hit_tokens=-1
        ),
        "prompt_cache_hit_tokens",
    ),
    "half-a-prompt-logprob": (
        pb.SampleResponse(sequences=[pb.SampledSequence()], prompt_logprobs=b"\0"),
        "prompt_logprobs",
    ),
    "alternatives-of-other-shape": (
        pb.SampleResponse(
            sequences=[pb.SampledSequence()],
            prompt_alt_tokens=pb.PromptAltTokens(
                tokens=dense(b"\0" * 8, shape=(1, 2)), logprobs=dense(b"\0" * 8, shape=(2, 1))
            ),
        ),
        "prompt_alt_tokens.logprobs",
    ),
    "alternatives-without-tokens": (
        pb.SampleResponse(
            sequences=[pb.SampledSequence()], prompt_alt_tokens=pb.PromptAltTokens()
        ),
        "prompt_alt_tokens.tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_a_hostile_sample_is_an_error_that_names_the_member(name: str):
    message, path = SAMPLES[name]
    with pytest.raises(InputError) as caught:
        decode_sample_response(message.SerializeToString(), ["q"])
    assert caught.value.path == path


def _bodies():
    datum = types.Datum(
        types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=[1, 2, 3]),
                types.ImageChunk(data=b"picture", format="png", expected_tokens=2),
            ]
        ),
        {
            "target_tokens": types.TensorData([5, 6], "int64", [3, 4], [0, 1, 1, 2], [3, 0]),
            "weights": np.ones((3, 4), "f4"),
        },
        [types.PromptProvenanceSpan(sequence_id="a", length=5)],
        [types.SampledProvenanceSpan(sequence_id="a", length=3)],
    )
    yield (
        decode_forward_backward,
        encode_forward_backward(
            model_id="m",
            seq_id=3,
            data=[datum, datum],
            loss_fn="ppo",
            loss_fn_config={"a": 1.0, "b": "c"},
        ),
    )
    output = types.ForwardBackwardOutput(
        "x", [{"a": types.TensorData([1.0, 2.0], "float32", [2])}] * 3, {"loss:sum": 1.0}
    )
    yield decode_forward_backward_output, encode_forward_backward_output(output)
    topk = types.TopkLogprobs.from_lists([[(1, -0.5), (2, -1.0)], None])
    response = types.SampleResponse(
        [types.SampledSequence("stop", "q", tokens=[1, 2], topk_logprobs_np=topk)],
        prompt_logprobs_np=np.array([np.nan, -1], "f4"),
        target_prompt_logprobs=types.TensorData([0.5], "float32", [2, 3], [0, 0, 1], [2]),
    )
    yield lambda body: decode_sample_response(body, ["q"]), encode_sample_response(response)


@pytest.mark.parametrize("which", range(3), ids=["request", "output", "sample"])
def test_every_truncation_and_many_corruptions_decode_or_raise_input_error(which: int):
    decode, body = list(_bodies())[which]
    rng = random.Random(which)
    broken = [body[:end] for end in range(len(body))]
    for _ in range(2000):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        broken.append(bytes(damaged))
    refused = 0
    for candidate in broken:
        try:
            decode(candidate)
        except InputError:
            refused += 1
    assert refused > len(body) // 2
