"""The protocol's own examples, byte for byte, in both directions."""

import math

import numpy as np
import pytest

from tinkex.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto_training import (
    decode_forward_backward,
    decode_forward_backward_output,
    encode_forward_backward,
    encode_forward_backward_output,
)
from tinkex.wire.values import fill_tensor, read_tensor

REQUEST = (
    "0a09733a747261696e3a3010011a380a0c0a0a0a08050000000600000012280a0d7461726765745f746f6b65"
    "6e7312170a10060000000000000007000000000000001802220102220d63726f73735f656e74726f7079"
)
CONFIG = (
    "2a0f0a046265746111000000000000e03f30013a110a0462657461120909000000000000e03f3a0e0a076c6f"
    "73735f6964120312014c"
)
SAMPLE = "0a1608011208090000000a0000001a08000000bf000080be12080000c07f000080bf"
OUTPUT = (
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000040c012"
    "18000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d110000"
    "000000001840"
)
CSR = (
    "122a0a040000003f12180000000000000000000000000000000001000000000000001a080200000000000000"
    "180122020203"
)


def test_a_training_request_encodes_to_the_protocols_bytes():
    datum = Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})
    encoded = encode_forward_backward(
        model_id="s:train:0", seq_id=1, data=[datum], loss_fn="cross_entropy"
    )
    assert encoded.hex() == REQUEST


def test_a_training_request_decodes_from_the_protocols_bytes():
    decoded = decode_forward_backward(bytes.fromhex(REQUEST))
    assert decoded.model_id == "s:train:0"
    assert decoded.seq_id == 1
    assert decoded.loss_fn == "cross_entropy"
    assert decoded.data == [Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})]
    assert decoded.forward_only is False
    assert decoded.loss_fn_config == {}


def test_numbers_of_a_loss_config_go_into_both_maps_and_text_into_the_second():
    encoded = encode_forward_backward(
        model_id="",
        seq_id=None,
        data=[],
        loss_fn="",
        loss_fn_config={"beta": 0.5, "loss_id": "L"},
        forward_only=True,
    )
    assert encoded.hex() == CONFIG


def test_a_loss_config_decodes_from_the_protocols_bytes():
    decoded = decode_forward_backward(bytes.fromhex(CONFIG))
    assert decoded.loss_fn_config == {"beta": 0.5, "loss_id": "L"}
    assert decoded.forward_only is True


@pytest.mark.req("S3")
def test_a_sample_encodes_to_the_protocols_bytes():
    sequence = SampledSequence(
        stop_reason="length", sequence_id="q", tokens=[9, 10], logprobs=[-0.5, -0.25]
    )
    response = SampleResponse([sequence], prompt_logprobs_np=np.array([np.nan, -1.0], "f4"))
    assert encode_sample_response(response, deterministic=True).hex() == SAMPLE


def test_a_sample_decodes_from_the_protocols_bytes():
    response = decode_sample_response(bytes.fromhex(SAMPLE), ["q"])
    (sequence,) = response.sequences
    assert sequence.stop_reason == "length"
    assert sequence.sequence_id == "q"
    assert sequence.tokens == [9, 10]
    assert sequence.logprobs == [-0.5, -0.25]
    assert response.prompt_logprobs == [None, -1.0]


def test_a_training_result_encodes_to_the_protocols_bytes():
    output = ForwardBackwardOutput(
        "ArrayRecord",
        [
            {"logprobs": TensorData([-1, -2], "float32", [2])},
            {"logprobs": TensorData([-3], "float32", [1])},
        ],
        {"loss:sum": 6.0},
    )
    assert encode_forward_backward_output(output, deterministic=True).hex() == OUTPUT


def test_a_training_result_decodes_from_the_protocols_bytes():
    output = decode_forward_backward_output(bytes.fromhex(OUTPUT))
    assert output.loss_fn_output_type == "ArrayRecord"
    assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [[-1, -2], [-3]]
    assert output.metrics == {"loss:sum": 6.0}


def test_a_sparse_tensor_encodes_to_the_protocols_bytes():
    message = pb.Tensor()
    fill_tensor(message, TensorData([0.5], "float32", [2, 3], [0, 0, 1], [2]))
    assert message.SerializeToString(deterministic=True).hex() == CSR


def test_a_sparse_tensor_decodes_from_the_protocols_bytes():
    tensor = read_tensor(pb.Tensor.FromString(bytes.fromhex(CSR)), "t")
    assert tensor.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.5]]
    assert tensor.sparse_col_indices == [2]


def test_not_computed_stays_apart_from_minus_infinity():
    response = SampleResponse([], prompt_logprobs_np=np.array([np.nan, -np.inf], "f4"))
    decoded = decode_sample_response(encode_sample_response(response), [])
    assert decoded.prompt_logprobs == [None, -math.inf]
