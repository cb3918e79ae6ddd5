"""Samples that one node computes for another: the operation and its outcome as bytes.

Made of the encodings that clients' samples have: an operation is a JSON object like a request's,
and a result has the protobuf of a `SampleResponse` behind a JSON object with the counts.
"""

# Without `from __future__ import annotations`: msgspec resolves these annotations.
import struct
from dataclasses import fields
from typing import Any, Final, cast

import msgspec

from tinkex.engine.protocol import SampleOp, SampleResult, Weights
from tinkex.errors import ErrorCategory, InputError, RequestFailedError
from tinkex.types import ModelInput, SamplingParams, TensorData
from tinkex.wire.json_codec import decode, encode
from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response

_LENGTH: Final = struct.Struct("<I")


class _Op(msgspec.Struct, frozen=True, kw_only=True):
    """`SampleOp`, field by field."""

    op_id: str
    weights: Weights
    prompt: ModelInput
    params: SamplingParams
    sequence_ids: tuple[str, ...]
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False
    cache_salt: str = ""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What comes before the response; of a failure, all there is."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    device_s: float = 0.0
    version: str = ""
    failure: str | None = None
    request_id: str | None = None
    category: ErrorCategory | None = None


def encode_op(op: SampleOp) -> bytes:
    """The body of the request to compute a sample."""
    values: dict[str, Any] = {field.name: getattr(op, field.name) for field in fields(op)}
    values["sequence_ids"] = tuple(op.sequence_ids)
    return encode(_Op(**values))


def decode_op(data: bytes) -> SampleOp:
    """The operation; raises InputError for anything malformed."""
    op = decode(_Op, data)
    return SampleOp(**{name: getattr(op, name) for name in op.__struct_fields__})


def encode_outcome(outcome: SampleResult | RequestFailedError) -> bytes:
    """The reply to it. The ids of sequences are not in it: the asker gave them."""
    if isinstance(outcome, RequestFailedError):
        head = _Head(
            failure=outcome.message, request_id=outcome.request_id, category=outcome.category
        )
        return _framed(head, b"")
    head = _Head(
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        generated_tokens=outcome.generated_tokens,
        device_s=outcome.device_s,
        version=outcome.version,
    )
    return _framed(head, encode_sample_response(outcome.response))


def decode_outcome(data: bytes, op: SampleOp) -> SampleResult | RequestFailedError:
    """What became of `op`; raises InputError for anything malformed."""
    if len(data) < _LENGTH.size:
        raise InputError("the outcome of a sample is cut short")
    (length,) = cast("tuple[int]", _LENGTH.unpack_from(data))
    end = _LENGTH.size + length
    if end > len(data):
        raise InputError("the outcome of a sample is cut short")
    head = decode(_Head, data[_LENGTH.size : end])
    if head.failure is not None:
        return RequestFailedError(head.failure, head.request_id, head.category or "unknown")
    return SampleResult(
        response=decode_sample_response(data[end:], op.sequence_ids, keep_empty=True),
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
        generated_tokens=head.generated_tokens,
        device_s=head.device_s,
        version=head.version,
    )


def _framed(head: _Head, body: bytes) -> bytes:
    encoded = encode(head)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, body))
