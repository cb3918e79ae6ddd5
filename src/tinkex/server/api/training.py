"""Training requests: forward, forward_backward, optim_step, saves, loads, custom losses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from tinkex.errors import InputError
from tinkex.server.api.checkpoints import readable, readers
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import as_strings
from tinkex.server.api.submit import (
    JSON_REQUESTS,
    accepted,
    encode_order,
    new_run,
    protobuf_input,
    submit_run,
    submit_training,
)
from tinkex.server.scheduler.checkpoints import check_loadable
from tinkex.server.store.records import LoadOrder, Operation, StoredLoss
from tinkex.types import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    ForwardBackwardInput,
    LoadWeightsRequest,
)
from tinkex.wire import routes
from tinkex.wire.json_codec import decode_object
from tinkex.wire.json_requests import decode_request, decode_training_request

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import OpKind

MAX_LOSS_NODES = 4096


async def forward_backward(call: Call) -> Response:
    """Both passes, or the first alone: protobuf from current clients, JSON from older ones."""
    media = call.header("content-type").partition(";")[0].strip().lower()
    if media == routes.MEDIA_PROTOBUF:
        return await _train_from_protobuf(call)
    if media not in ("", routes.MEDIA_JSON):
        raise refuse(
            415,
            f"Content-Type {media!r} is not understood; "
            f"send {routes.MEDIA_PROTOBUF} or {routes.MEDIA_JSON}.",
        )
    return await _train_from_json(call, "forward_backward")


async def _train_from_protobuf(call: Call) -> Response:
    body, media = await call.body(), routes.MEDIA_PROTOBUF
    ids, request = protobuf_input(body)
    kind: OpKind = "forward" if ids.forward_only else "forward_backward"
    return await submit_training(
        call, kind, ids.model_id, ids.seq_id, request, body=body, media=media
    )


async def _train_from_json(call: Call, kind: Literal["forward", "forward_backward"]) -> Response:
    body = await call.body()
    try:
        batch = decode_training_request(body, forward_only=kind == "forward")
    except InputError as error:
        return await _refused_in_turn(call, kind, body, error)
    request: ForwardBackwardInput | InputError
    try:
        request = batch.checked()
    except InputError as error:
        request = error
    kind = "forward" if batch.forward_only else "forward_backward"
    return await submit_training(call, kind, batch.model_id, batch.seq_id, request, body=body)


async def forward(call: Call) -> Response:
    """The forward pass of clients that have a route of its own for it."""
    return await _train_from_json(call, "forward")


async def optim_step(call: Call) -> Response:
    """Apply the accumulated gradient."""
    return await _submit_json(call, "optim_step")


async def save_weights(call: Call) -> Response:
    """Save weights and optimizer state for resuming."""
    return await _submit_json(call, "save_weights")


async def save_weights_for_sampler(call: Call) -> Response:
    """Save weights for sampling: under a name, or as a sampler of this session."""
    return await _submit_json(call, "save_weights_for_sampler")


async def save_weights_external(call: Call) -> Response:
    """Export weights for downloading."""
    return await _submit_json(call, "save_weights_external")


async def _submit_json(call: Call, kind: OpKind) -> Response:
    body = await call.body()
    try:
        request = decode_request(JSON_REQUESTS[kind], body)
    except InputError as error:
        return await _refused_in_turn(call, kind, body, error)
    return await submit_training(call, kind, request.model_id, request.seq_id, request, body=body)


async def _refused_in_turn(call: Call, kind: OpKind, body: bytes, error: InputError) -> Response:
    raw = decode_object(body)
    model_id, seq_id = raw.get("model_id"), raw.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int:
        raise error
    return await submit_training(call, kind, model_id, seq_id, error, body=body)


async def load_weights(call: Call) -> Response:
    """Load into a model, or make a model from a checkpoint."""
    request = await call.json(LoadWeightsRequest)
    owners = await readers(call, request.weights_access_token)
    if request.model_id is not None:
        order = LoadOrder(path=request.path, optimizer=request.optimizer, readers=owners)
        return await submit_training(
            call,
            "load_weights",
            request.model_id,
            request.seq_id,
            order,
            body=encode_order(order),
        )
    if request.session_id is None or request.model_seq_id is None:
        raise refuse(400, "Name a model_id, or a session_id and model_seq_id to make one.")
    return await _create_from(call, request, owners)


async def _create_from(
    call: Call, request: LoadWeightsRequest, owners: tuple[str, ...]
) -> Response:
    session = await call.live_session(cast("str", request.session_id))
    checkpoint = await readable(call, request.path, owners)
    check_loadable(checkpoint, optimizer=request.optimizer)
    if request.base_model not in (None, checkpoint.base_model):
        raise refuse(
            400, f"{request.path} is on {checkpoint.base_model}, not on {request.base_model}."
        )
    run = new_run(
        call, session.session_id, request.model_seq_id, checkpoint.base_model, checkpoint.lora
    )
    run = replace(
        run,
        optimizer=checkpoint.optimizer
        if request.optimizer
        else request.optimizer_config or run.optimizer,
        user_metadata=as_strings(request.user_metadata),
        project_id=session.project_id,
    )
    order = LoadOrder(
        path=request.path, optimizer=request.optimizer, readers=owners, creates_model=True
    )
    return await submit_run(call, run, "load_weights", order, encode_order(order))


async def create_custom_loss(call: Call) -> Response:
    """Keep an uploaded loss; what its graph may compute is checked when it runs."""
    request = await call.json(CreateCustomLossRequest)
    session = await call.live_session(request.session_id)
    nodes = request.graph.nodes
    if not 0 < len(nodes) <= MAX_LOSS_NODES:
        raise refuse(400, f"graph.nodes must have 1 to {MAX_LOSS_NODES} nodes, not {len(nodes)}.")
    loss_id = f"{session.session_id}:loss:{request.custom_loss_seq_id}"
    await call.store.add_loss(
        StoredLoss(
            loss_id=loss_id,
            owner=call.owner,
            session_id=session.session_id,
            inputs=tuple(request.inputs),
            graph=request.graph,
        )
    )
    operation = Operation(
        op_id=loss_id,
        kind="create_custom_loss",
        owner=call.owner,
        session_id=session.session_id,
        created_at=call.now(),
        request=None,
    )
    value = CreateCustomLossResponse(loss_id=loss_id)
    return accepted(await call.worker.submit_done(operation, value))


# Requests that are numbered: those behind one of them wait while it is being read.
IN_ORDER = frozenset(
    route.name
    for route in (
        routes.FORWARD_BACKWARD,
        routes.FORWARD,
        routes.OPTIM_STEP,
        routes.SAVE_WEIGHTS,
        routes.SAVE_WEIGHTS_FOR_SAMPLER,
        routes.SAVE_WEIGHTS_EXTERNAL,
        routes.LOAD_WEIGHTS,
    )
)
