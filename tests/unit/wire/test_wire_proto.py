"""The rules of the protobuf bodies that the protocol's examples do not show."""

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
    renumber_forward_backward,
)


def request(*data: types.Datum, **options: object) -> bytes:
    fields: dict[str, object] = {"model_id": "m", "seq_id": 1, "loss_fn": "ppo", **options}
    return encode_forward_backward(data=data, **fields)


def tensor(values: object) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values))


def output(*outputs: dict[str, types.TensorData], kind: str = "ArrayRecord"):
    return types.ForwardBackwardOutput(kind, list(outputs), {})


def test_every_kind_of_chunk_but_the_pointer_can_be_trained_on():
    datum = types.Datum(
        types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=[1, 2**31 - 1]),
                types.EncodedTextChunk(tokens=[]),
                types.ImageChunk(data=b"\x00\xff", format="jpeg", expected_tokens=0),
                types.ImageChunk(data=b"p", format="png"),
                types.DmelChunk(dmel=b"\x01"),
            ]
        )
    )
    assert decode_forward_backward(request(datum)).data == [datum]


@pytest.mark.req("S8")
def test_pictures_are_raw_bytes_in_protobuf():
    picture = bytes(range(256))
    datum = types.Datum(
        types.ModelInput(chunks=[types.ImageChunk(data=picture, format="png", expected_tokens=2)])
    )
    message = pb.ForwardBackwardRequest.FromString(request(datum))
    assert message.data[0].model_input[0].image.data == picture


def test_a_picture_pointer_cannot_be_trained_on_and_the_error_names_it():
    pointer = types.ImageAssetPointerChunk(format="png", location="s3://x")
    good = types.Datum(types.ModelInput.from_ints([1]))
    bad = types.Datum(types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), pointer]))
    with pytest.raises(InputError, match="ImageChunk") as caught:
        request(good, bad)
    assert caught.value.path == "data[1].model_input.chunks[1]"


def test_a_token_count_that_does_not_fit_is_an_error_that_names_it():
    picture = types.ImageChunk(data=b"p", format="png", expected_tokens=2**31)
    with pytest.raises(InputError) as caught:
        request(types.Datum(types.ModelInput(chunks=[picture])))
    assert caught.value.path == "data[0].model_input.chunks[0].expected_tokens"


@pytest.mark.parametrize(
    ("datum", "options"),
    [
        (types.Datum(types.ModelInput.from_ints([1]), {"\ud800": [1]}), {}),
        (
            types.Datum(
                types.ModelInput.from_ints([1]),
                {},
                [types.PromptProvenanceSpan(sequence_id="\ud800", length=1)],
                [],
            ),
            {},
        ),
        (types.Datum(types.ModelInput.from_ints([1])), {"loss_fn_config": {"\ud800": 1.0}}),
        (types.Datum(types.ModelInput.from_ints([1])), {"model_id": "\ud800"}),
    ],
)
def test_text_that_no_encoding_has_is_an_input_error(datum: types.Datum, options: dict):
    with pytest.raises(InputError, match="not valid Unicode"):
        request(datum, **options)


def test_equal_batches_have_equal_bytes_whatever_the_order_of_their_names():
    one, other = {"b": [1], "a": [2]}, {"a": [2], "b": [1]}
    tokens = types.ModelInput.from_ints([1])
    assert request(types.Datum(tokens, one)) == request(types.Datum(tokens, other))


def test_both_lists_of_spans_travel():
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {"target_tokens": [2, 3]},
        model_input_spans=[types.PromptProvenanceSpan(sequence_id="a", length=2)],
        loss_fn_input_spans=[
            types.PromptProvenanceSpan(sequence_id="a", offset=1, length=1),
            types.SampledProvenanceSpan(sequence_id="b", length=1),
        ],
    )
    assert decode_forward_backward(request(datum)).data == [datum]


def test_an_empty_list_of_spans_beside_a_full_one_stays_empty():
    span = types.PromptProvenanceSpan(sequence_id="a", length=1)
    datum = types.Datum(types.ModelInput.from_ints([1]), {}, [span], [])
    assert decode_forward_backward(request(datum)).data == [datum]


def test_two_empty_lists_of_spans_mean_that_nothing_is_known():
    datum = types.Datum(types.ModelInput.from_ints([1]), {}, [], [])
    (decoded,) = decode_forward_backward(request(datum)).data
    assert decoded.model_input_spans is None
    assert decoded.loss_fn_input_spans is None


def test_a_sparse_input_travels_sparse():
    sparse = types.TensorData([5, 6], "int64", [3, 4], [0, 1, 1, 2], [3, 0])
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": sparse})
    decoded = decode_forward_backward(request(datum)).data[0].loss_fn_inputs["target_tokens"]
    assert decoded.sparse_crow_indices == [0, 1, 1, 2]
    assert decoded == sparse


def test_a_tensor_without_a_shape_is_one_dimensional():
    datum = types.Datum(
        types.ModelInput.from_ints([1]), {"weights": types.TensorData([1, 2], "float32")}
    )
    (decoded,) = decode_forward_backward(request(datum)).data
    assert decoded.loss_fn_inputs["weights"].shape == [2]


def test_non_contiguous_arrays_travel_by_value():
    strided = np.arange(6, dtype="i8").reshape(2, 3).T[::2]
    datum = types.Datum(types.ModelInput.from_ints([1]), {"x": strided})
    (decoded,) = decode_forward_backward(request(datum)).data
    assert decoded.loss_fn_inputs["x"].tolist() == strided.tolist()


def test_servers_that_know_only_numbers_read_the_first_map():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    message.loss_fn_config["beta"] = 0.25
    assert decode_forward_backward(message.SerializeToString()).loss_fn_config == {"beta": 0.25}


def test_the_second_map_wins_when_it_says_anything():
    message = pb.ForwardBackwardRequest()
    message.loss_fn_config["beta"] = 0.25
    message.loss_fn_config_v2["loss_id"].text = "L"
    assert decode_forward_backward(message.SerializeToString()).loss_fn_config == {"loss_id": "L"}


def test_a_loss_setting_of_another_type_is_refused_by_name():
    with pytest.raises(InputError) as caught:
        request(loss_fn_config={"beta": None})
    assert caught.value.path == 'loss_fn_config["beta"]'


@pytest.mark.parametrize("seq_id", [-1, 2**31])
def test_a_sequence_number_that_does_not_fit_is_refused(seq_id: int):
    with pytest.raises(InputError, match="seq_id"):
        request(seq_id=seq_id)


def test_datums_with_other_trailing_shapes_get_a_record_of_their_own():
    result = output(
        {"logprobs": tensor(np.zeros((2, 3), "f4"))},
        {"logprobs": tensor(np.ones((4, 3), "f4"))},
        {"logprobs": tensor(np.ones((4, 5), "f4"))},
        {"logprobs": tensor(np.ones((1, 3), "f4"))},
    )
    encoded = encode_forward_backward_output(result)
    records = pb.ForwardBackwardOutput.FromString(encoded).loss_fn_outputs
    assert [record.num_datums for record in records] == [2, 1, 1]
    assert decode_forward_backward_output(encoded) == result


def test_offsets_count_bytes():
    result = output({"x": tensor([1, 2])}, {"x": tensor([3])})
    message = pb.ForwardBackwardOutput.FromString(encode_forward_backward_output(result))
    offsets = np.frombuffer(message.loss_fn_outputs[0].fields["x"].offsets, "<i8")
    assert offsets.tolist() == [0, 16, 24]


def test_a_scalar_per_datum_comes_back_as_one_value():
    result = output({"loss": tensor(np.float32(1.5))}, {"loss": tensor(np.float32(2.5))})
    decoded = decode_forward_backward_output(encode_forward_backward_output(result))
    assert [each["loss"].shape for each in decoded.loss_fn_outputs] == [[1], [1]]
    assert [each["loss"].tolist() for each in decoded.loss_fn_outputs] == [[1.5], [2.5]]


def test_datums_without_outputs_are_still_counted():
    result = output({}, {}, {})
    assert decode_forward_backward_output(encode_forward_backward_output(result)) == result


def test_outputs_with_different_names_cannot_be_sent():
    with pytest.raises(InputError, match=r"loss_fn_outputs\[1\]"):
        encode_forward_backward_output(output({"a": tensor([1])}, {"b": tensor([1])}))


def batched(dtype: int, data: bytes, offsets: list[int], *trailing: int) -> pb.BatchedTensor:
    packed = np.array(offsets, "<i8").tobytes()
    return pb.BatchedTensor(data=data, offsets=packed, dtype=dtype, trailing_shape=trailing)


def record(count: int, **fields: pb.BatchedTensor) -> pb.ArrayRecord:
    message = pb.ArrayRecord(num_datums=count)
    for name, value in fields.items():
        message.fields[name].CopyFrom(value)
    return message


def serialized(*records: pb.ArrayRecord, kind: str = "") -> bytes:
    return pb.ForwardBackwardOutput(
        loss_fn_outputs=records, loss_fn_output_type=kind
    ).SerializeToString()


def test_bfloat16_results_are_widened():
    halves = (np.array([1.5, -2.0, 3.0], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    decoded = decode_forward_backward_output(
        serialized(record(2, x=batched(pb.DTYPE_BFLOAT16, halves, [0, 2, 6])))
    )
    assert [each["x"].tolist() for each in decoded.loss_fn_outputs] == [[1.5], [-2.0, 3.0]]
    assert decoded.loss_fn_outputs[0]["x"].dtype == "float32"


def test_int32_results_are_widened():
    decoded = decode_forward_backward_output(
        serialized(
            record(1, x=batched(pb.DTYPE_INT32, np.array([-1, 7], "<i4").tobytes(), [0, 8], 2))
        )
    )
    (only,) = decoded.loss_fn_outputs
    assert (only["x"].dtype, only["x"].tolist()) == ("int64", [[-1, 7]])


def test_without_a_count_the_slices_are_counted():
    data = np.array([1.0, 2.0], "<f4").tobytes()
    decoded = decode_forward_backward_output(
        serialized(record(0, x=batched(pb.DTYPE_FLOAT32, data, [0, 4, 8])))
    )
    assert len(decoded.loss_fn_outputs) == 2


@pytest.mark.parametrize(
    ("sent", "records", "read"),
    [
        ("torch.module:TorchLossReturn", 1, "TorchLossReturn"),
        ("ArrayRecord", 1, "ArrayRecord"),
        ("a:b:C", 1, "C"),
        ("", 0, "ArrayRecord"),
        ("a:B", 0, "a:B"),
    ],
)
def test_the_output_type_is_a_bare_name(sent: str, records: int, read: str):
    body = serialized(*[record(1)] * records, kind=sent)
    assert decode_forward_backward_output(body).loss_fn_output_type == read


def test_metrics_keep_numbers_that_json_does_not_have():
    result = types.ForwardBackwardOutput("x", [], {"a:sum": float("-inf")})
    decoded = decode_forward_backward_output(encode_forward_backward_output(result))
    assert decoded.metrics == {"a:sum": float("-inf")}


def test_decoded_arrays_can_be_written_to():
    result = output({"x": tensor([1.0, 2.0])})
    decoded = decode_forward_backward_output(encode_forward_backward_output(result))
    decoded.loss_fn_outputs[0]["x"].to_numpy()[0] = 5.0
    sample = types.SampleResponse([types.SampledSequence("stop", "q", tokens=[1])])
    (sequence,) = decode_sample_response(encode_sample_response(sample), ["q"]).sequences
    assert sequence.tokens_np is not None
    assert sequence.tokens_np.flags.writeable


def test_empty_or_absent_logprobs_are_none():
    message = pb.SampleResponse(prompt_logprobs=b"")
    message.sequences.add().tokens = b""
    message.sequences.add(tokens=b"\1\0\0\0", logprobs=b"")
    response = decode_sample_response(message.SerializeToString(), ["a", "b"])
    assert response.prompt_logprobs is None
    assert [sequence.logprobs for sequence in response.sequences] == [None, None]
    assert [sequence.tokens for sequence in response.sequences] == [[], [1]]
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "stop"]


def test_empty_cells_of_the_best_tokens_are_left_out():
    message = pb.SampleResponse()
    message.topk_prompt_logprobs.k = 2
    message.topk_prompt_logprobs.length = 3
    message.topk_prompt_logprobs.token_ids = np.array([0, 0, 7, 0, 7, 8], "<i4").tobytes()
    message.topk_prompt_logprobs.logprobs = np.array(
        [-99999, -99999, -1, -99999, -1, -2], "<f4"
    ).tobytes()
    response = decode_sample_response(message.SerializeToString(), [])
    assert response.topk_prompt_logprobs == [None, [(7, -1.0)], [(7, -1.0), (8, -2.0)]]


def test_the_best_tokens_of_nothing_are_none():
    message = pb.SampleResponse()
    message.topk_prompt_logprobs.length = 2**32 - 1
    assert decode_sample_response(message.SerializeToString(), []).topk_prompt_logprobs is None


def test_everything_a_sample_can_carry_comes_back():
    topk = types.TopkLogprobs.from_lists([[(1, -0.5), (2, -1.0)], None])
    response = types.SampleResponse(
        [types.SampledSequence("stop", "q", tokens=[1, 2], topk_logprobs_np=topk)],
        prompt_logprobs_np=np.array([np.nan, -1], "f4"),
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=types.TensorData([0.5], "float32", [2, 3], [0, 0, 1], [2]),
        prompt_cache_hit_tokens=5,
        prompt_alt_tokens=types.PromptAltTokens(
            types.TensorData([[1, 2]], "int64", [1, 2]),
            types.TensorData([[-1, -2]], "float32", [1, 2]),
        ),
    )
    assert decode_sample_response(encode_sample_response(response), ["q"]) == response


@pytest.mark.parametrize(("old", "new"), [(1, 2), (1, 300), (300, 1), (0, 2**31 - 1)])
def test_a_batch_can_get_another_number_without_being_written_again(old: int, new: int):
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"weights": tensor([1.0, 0.5, 0.0])})
    body = request(datum, seq_id=old, loss_fn_config={"beta": 0.5})
    renumbered = renumber_forward_backward(body, "m", old, new)
    assert renumbered == request(datum, seq_id=new, loss_fn_config={"beta": 0.5})
