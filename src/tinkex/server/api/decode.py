"""Requests from their stored form: what a restart runs, and what arrives, are read alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from tinkex.errors import InputError
from tinkex.server.store.records import LoadOrder
from tinkex.types import (
    CreateModelRequest,
    ForwardBackwardInput,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)
from tinkex.wire import routes
from tinkex.wire.json_requests import decode_request, decode_training_request
from tinkex.wire.proto_codec import decode_forward_backward

if TYPE_CHECKING:
    from tinkex.server.store.records import Operation, OpKind
    from tinkex.wire.proto_codec import DecodedForwardBackward

JSON_REQUESTS: dict[OpKind, type[Any]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "unload_model": UnloadModelRequest,
}


def decode_operation(op: Operation) -> object:
    """An operation's request; raises InputError where it never could be understood."""
    if op.kind in ("forward", "forward_backward"):
        forward_only = op.kind == "forward"
        return training_input(decode_batch(op.body, op.media, forward_only=forward_only))
    if op.kind == "load_weights":
        return decode_order(op.body)
    kind = JSON_REQUESTS.get(op.kind)
    if kind is None:
        raise InputError(f"{op.kind} is not kept", "request")
    return decode_request(kind, op.body)


def decode_batch(body: bytes, media: str, *, forward_only: bool) -> DecodedForwardBackward:
    """A training batch; protobuf says itself whether it is a forward pass alone."""
    if media == routes.MEDIA_PROTOBUF:
        return decode_forward_backward(body)
    return decode_training_request(body, forward_only=forward_only)


def training_input(batch: DecodedForwardBackward) -> ForwardBackwardInput:
    """What the engine needs of a batch."""
    return ForwardBackwardInput(
        data=batch.data,
        loss_fn=cast("Any", batch.loss_fn),
        loss_fn_config=batch.loss_fn_config,
    )


def encode_order(order: LoadOrder) -> bytes:
    """A load in its stored form, which has no token in it."""
    return msgspec.json.encode(order)


def decode_order(body: bytes) -> LoadOrder:
    """The same, read."""
    try:
        return msgspec.json.decode(body, type=LoadOrder)
    except msgspec.MsgspecError as error:
        raise InputError(str(error), "load_weights") from error
