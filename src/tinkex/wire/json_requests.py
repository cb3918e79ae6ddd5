"""JSON requests as a server must read them: from every released client.

Clients before 0.18 leave out whatever their caller did not set, chunk kinds included, and yet
send nulls that were passed on purpose. So a null member means an absent one here, and a chunk
without a kind is recognised by its members. A request of a current
client decodes as it is, and is never changed.
"""

# Without `from __future__ import annotations`: msgspec resolves these annotations.
from functools import cache
from typing import Any, TypeVar, cast, get_args

import msgspec
from msgspec.structs import fields as struct_fields

from tinkex.errors import InputError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
)
from tinkex.wire import json_codec
from tinkex.wire.bodies import EXPLICIT_NULLS
from tinkex.wire.bounded import check_bounds
from tinkex.wire.proto_training import DecodedForwardBackward
from tinkex.wire.values import construct

T = TypeVar("T")
_Kinds = tuple[type[msgspec.Struct], ...]

# The member by which a chunk is recognised. Text comes last: the oldest pictures also say how many
# tokens they are.
_CHUNK_MEMBERS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("data", ImageChunk),
    ("location", ImageAssetPointerChunk),
    ("dmel", DmelChunk),
    ("tokens", EncodedTextChunk),
)


class _Datum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class _Batch(msgspec.Struct):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _ForwardBackward(msgspec.Struct):
    forward_backward_input: _Batch
    model_id: str
    seq_id: int | None = None


class _Forward(msgspec.Struct):
    forward_input: _Batch
    model_id: str
    seq_id: int | None = None


# The same without what takes long to decode, which msgspec skips fast.


class RequestIds(msgspec.Struct):
    """The members by which a training request has its place in the order of its model."""

    model_id: str
    seq_id: int | None = None


class _BatchHead(msgspec.Struct):
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _ForwardBackwardHead(RequestIds, kw_only=True):
    forward_backward_input: _BatchHead


class _ForwardHead(RequestIds, kw_only=True):
    forward_input: _BatchHead


TRAINING_BODIES: dict[str, type[msgspec.Struct]] = {
    "forward_backward": _ForwardBackward,
    "forward": _Forward,
}
"""How the two training routes look in JSON, by the name of the route."""


def decode_request(kind: type[T], data: bytes | str) -> T:
    """A request of `kind` within its bounds; raises InputError with the path of what is wrong."""
    try:
        request = json_codec.decode(kind, data)
    except InputError:
        if issubclass(kind, RequestIds):
            raise
        request = json_codec.convert(kind, _tidied(kind, json_codec.decode_object(data)))
    check_bounds(request)
    return request


def decode_ids(data: bytes | str) -> RequestIds:
    """The ids of a training request, whatever else is in it."""
    return decode_request(RequestIds, data)


def decode_training_head(
    data: bytes | str, *, forward_only: bool = False
) -> DecodedForwardBackward:
    """A training batch without its data; of a batch that cannot be decoded, its ids alone."""
    try:
        if forward_only:
            forward = decode_request(_ForwardHead, data)
            ids, batch = forward, forward.forward_input
        else:
            both = decode_request(_ForwardBackwardHead, data)
            ids, batch = both, both.forward_backward_input
    except InputError:
        ids, batch = decode_ids(data), _BatchHead("")
    return DecodedForwardBackward(
        model_id=ids.model_id,
        seq_id=ids.seq_id,
        data=[],
        loss_fn=batch.loss_fn,
        loss_fn_config=batch.loss_fn_config or {},
        forward_only=forward_only,
    )


def _tidied(kind: type[T], body: dict[str, Any]) -> Any:
    try:
        return _tidy(body, _structs(kind))
    except RecursionError as error:
        raise json_codec.input_error(error) from error


def decode_training_request(
    data: bytes | str, *, forward_only: bool = False
) -> DecodedForwardBackward:
    """A training batch in JSON; `forward_only` is decided by the path it came to."""
    if forward_only:
        forward = decode_request(_Forward, data)
        name, batch, request = "forward_input", forward.forward_input, forward
    else:
        request = decode_request(_ForwardBackward, data)
        name, batch = "forward_backward_input", request.forward_backward_input
    return DecodedForwardBackward(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=[
            construct(
                f"{name}.data[{index}]",
                Datum,
                model_input=datum.model_input,
                loss_fn_inputs=datum.loss_fn_inputs,
            )
            for index, datum in enumerate(batch.data)
        ],
        loss_fn=batch.loss_fn,
        loss_fn_config=batch.loss_fn_config or {},
        forward_only=forward_only,
    )


def _tidy(value: Any, kinds: _Kinds) -> Any:
    """Without null members, and with the kinds of chunks filled in."""
    if isinstance(value, list):
        return [_tidy(item, kinds) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    members = cast("dict[str, Any]", value)
    kind = _choose(members, kinds)
    if kind is None:
        return members
    config, nested = kind.__struct_config__, _nested(kind)
    tidied: dict[str, Any] = {}
    if config.tag_field is not None and len(kinds) > 1:
        tidied[config.tag_field] = config.tag
    explicit = EXPLICIT_NULLS.get(kind, frozenset())
    for name, item in members.items():
        if item is not None or name in explicit:
            tidied[name] = _tidy(item, nested[name]) if name in nested else item
    for name in _nullable(kind) - explicit:
        tidied.setdefault(name, None)
    return tidied


def _choose(members: dict[str, Any], kinds: _Kinds) -> type[msgspec.Struct] | None:
    """Which of `kinds` an object is; None leaves it to the decoder to complain."""
    if len(kinds) == 1:
        return kinds[0]
    for kind in kinds:
        config = kind.__struct_config__
        if config.tag_field is not None and members.get(config.tag_field) == config.tag:
            return kind
    if EncodedTextChunk not in kinds or members.get("type") is not None:
        return None
    return next((kind for name, kind in _CHUNK_MEMBERS if name in members), None)


@cache
def _nested(kind: type[msgspec.Struct]) -> dict[str, _Kinds]:
    """The members that hold structs, and which."""
    found = {field.encode_name: _structs(field.type) for field in struct_fields(kind)}
    return {name: kinds for name, kinds in found.items() if kinds}


@cache
def _nullable(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Members that a caller must give and may give as None, which is then not written."""
    return frozenset(
        field.encode_name
        for field in struct_fields(kind)
        if field.required and type(None) in get_args(field.type)
    )


def _structs(hint: Any) -> _Kinds:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return (hint,)
    return tuple(kind for part in get_args(hint) for kind in _structs(part))
