"""The protocol's protobuf bodies: training batches and results, and sample results.

Encoders take the public types and give bytes; decoders give the types back or raise
InputError. `deterministic` fixes the order of map entries, which the protocol leaves open.
"""

from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto_training import (
    DecodedForwardBackward,
    decode_forward_backward,
    decode_forward_backward_output,
    encode_forward_backward,
    encode_forward_backward_output,
    renumber_forward_backward,
)

__all__ = [
    "DecodedForwardBackward",
    "decode_forward_backward",
    "decode_forward_backward_output",
    "decode_sample_response",
    "encode_forward_backward",
    "encode_forward_backward_output",
    "encode_sample_response",
    "renumber_forward_backward",
]
