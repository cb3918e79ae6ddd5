"""Accepting work: a request becomes an operation, the operation's id the future.

A training request whose ids can be read but whose data cannot is accepted, too, and fails when its
turn comes: a refusal would leave a gap in its model's order, and official clients stop for ever
when one chunk of a call is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import APIStatusError, InputError, quoted
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.store.records import EncodedBatch, LoadOrder, Model, Operation, changed
from tinkex.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
    UntypedAPIFuture,
)
from tinkex.wire import routes
from tinkex.wire.bounded import check_integer, check_text
from tinkex.wire.json_requests import (
    decode_request,
    decode_training_head,
    decode_training_request,
)
from tinkex.wire.proto_training import decode_forward_backward, decode_head
from tinkex.wire.routes import MEDIA_JSON

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import OpKind
    from tinkex.types import ForwardBackwardInput, LoraConfig
    from tinkex.wire.proto_training import DecodedForwardBackward


def accepted(operation: Operation) -> Response:
    """The answer to every accepted request."""
    sequence_ids = list(operation.sequence_ids) if operation.kind == "sample" else None
    return reply(
        UntypedAPIFuture(
            request_id=operation.op_id,
            model_id=operation.model_id,
            sample_sequence_ids=sequence_ids,
        )
    )


def check_program(call: Call, model: Model) -> None:
    """Refuse the program of a model that another program has attached to.

    A program that attached names its session in every request. The one that created the model
    need not: the model's id begins with its session.
    """
    if model.model_id.startswith(f"{model.session_id}:"):
        return
    if call.header(routes.SESSION_HEADER) != model.session_id:
        raise refuse(
            400,
            f"Another program has attached to model {quoted(model.model_id)} (session "
            f"{quoted(model.session_id)}), so this program can no longer train it.",
        )


async def submit_training(
    call: Call,
    kind: OpKind,
    model_id: str,
    seq_id: int | None,
    request: object,
    *,
    body: bytes,
    media: str = MEDIA_JSON,
) -> Response:
    """Queue an operation of a model; one with a known seq_id is answered by the first.

    `body` is what a restart runs the operation from; `request` the same, decoded.
    """
    model = await call.model(model_id)
    check_program(call, model)
    await call.own(model_id, model.base_model)
    operation = Operation(
        op_id=f"{model_id}:{seq_id}",
        kind=kind,
        owner=call.owner,
        session_id=model.session_id,
        created_at=call.now(),
        body=body,
        media=media,
        request=request,
        seq_id=seq_id or 0,
        model_id=model_id,
    )
    if seq_id is None:
        return accepted(await _submit_unnumbered(call, operation))
    try:
        await _check(call, operation)
    except APIStatusError:
        # Looked up only now: almost every request is new and accepted.
        known = await call.store.get_operation(operation.op_id)
        if known is None:
            raise
        return accepted(known)
    return accepted(await call.worker.submit(operation))


async def _check(call: Call, operation: Operation) -> None:
    """Refuse what the limits do not allow; the caller checks whether it was accepted before."""
    await call.live_session(operation.session_id)
    model_id, size_bytes = operation.model_id or "", len(operation.body)
    call.parts.limits.training(call.owner, model_id, operation.seq_id, size_bytes)
    await call.parts.limits.storage(call.owner, size_bytes)


async def _submit_unnumbered(call: Call, operation: Operation) -> Operation:
    """Clients that do not number their requests are ordered by arrival and recognised by key."""
    key = call.idempotency_key()
    known = await call.store.recall(call.owner, key) if key else None
    first = await call.store.get_operation(known) if known is not None else None
    if first is not None and first.kind == operation.kind:
        return first
    await _check(call, operation)
    model_id = operation.model_id or ""
    seq_id = await call.worker.take_turn(model_id)
    operation = changed(operation, op_id=f"{model_id}:{seq_id}", seq_id=seq_id)
    try:
        if key:
            await call.store.remember(call.owner, key, operation.op_id)
        return await call.worker.submit(operation)
    except BaseException:
        call.worker.give_turn_back(model_id, seq_id)
        raise


def new_run(
    call: Call, session_id: str, number: int | None, base_model: str, lora: LoraConfig
) -> Model:
    """The record of a training run of the caller, with the default optimizer."""
    now = call.now()
    return Model(
        model_id=f"{session_id}:train:{number or 0}",
        owner=call.owner,
        session_id=session_id,
        base_model=base_model,
        lora=lora,
        optimizer=AdamOptimizerConfig(),
        created_at=now,
        last_request_at=now,
    )


async def submit_run(
    call: Call, run: Model, kind: OpKind, request: object, body: bytes, *, here: bool = False
) -> Response:
    """Add a run that is not known yet, and queue its first operation, which makes the model."""
    await call.own(run.model_id, run.base_model, here=here)
    run = await call.parts.limits.add_model(run)
    operation = Operation(
        op_id=f"{run.model_id}:0",
        kind=kind,
        owner=call.owner,
        session_id=run.session_id,
        created_at=call.now(),
        body=body,
        request=request,
        model_id=run.model_id,
    )
    return accepted(await call.worker.submit(operation))


JSON_REQUESTS: dict[OpKind, type[Any]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "unload_model": UnloadModelRequest,
}


def decode_operation(op: Operation) -> object:
    """An operation's request; raises InputError for a body that cannot be decoded."""
    if op.kind in ("forward", "forward_backward"):
        forward_only = op.kind == "forward"
        return training_input(op.body, op.media, forward_only=forward_only)[1]
    if op.kind == "load_weights":
        return decode_order(op.body)
    kind = JSON_REQUESTS.get(op.kind)
    if kind is None:
        raise InputError(f"{op.kind} is not kept", "request")
    return decode_request(kind, op.body)


def training_input(
    body: bytes, media: str, *, forward_only: bool = False
) -> tuple[DecodedForwardBackward, EncodedBatch]:
    """A batch without its data, and its request; raises InputError where it has no ids.

    Its data is decoded when it runs, and in the engine's process where that is possible.
    """
    if media == routes.MEDIA_PROTOBUF:
        head = decode_head(body)
        check_text("model_id", head.model_id)
        check_integer("seq_id", head.seq_id or 0)
    else:
        head = decode_training_head(body, forward_only=forward_only)

    def decode() -> ForwardBackwardInput:
        if media == routes.MEDIA_PROTOBUF:
            return decode_forward_backward(body).checked()
        return decode_training_request(body, forward_only=forward_only).checked()

    config = head.loss_fn_config if head.loss_fn == "custom" else None
    return head, EncodedBatch(decode=decode, custom_loss=config)


def encode_order(order: LoadOrder) -> bytes:
    """A load in its stored form, which has no token in it."""
    return msgspec.json.encode(order)


def decode_order(body: bytes) -> LoadOrder:
    """The inverse of `encode_order`."""
    try:
        return msgspec.json.decode(body, type=LoadOrder)
    except msgspec.MsgspecError as error:
        raise InputError(str(error), "load_weights") from error
