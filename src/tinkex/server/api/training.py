"""Training requests: forward, forward_backward, optim_step, saves, loads, custom losses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from tinkex.errors import InputError, quoted
from tinkex.server.api.checkpoints import readable, readers
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import as_strings
from tinkex.server.api.submit import (
    JSON_REQUESTS,
    accepted,
    encode_order,
    new_run,
    submit_run,
    submit_training,
    training_input,
)
from tinkex.server.scheduler.checkpoints import check_loadable
from tinkex.server.store.records import LoadOrder, Operation, StoredLoss
from tinkex.types import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    LoadWeightsRequest,
)
from tinkex.wire import routes
from tinkex.wire.json_requests import decode_ids, decode_request

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import OpKind


async def forward_backward(call: Call) -> Response:
    """Both passes, or the first alone: protobuf from current clients, JSON from older ones."""
    media = call.header("content-type").partition(";")[0].strip().lower()
    if media not in ("", routes.MEDIA_JSON, routes.MEDIA_PROTOBUF):
        raise refuse(
            415,
            f"Content-Type {quoted(media)} is not understood; "
            f"send {routes.MEDIA_PROTOBUF} or {routes.MEDIA_JSON}.",
        )
    return await _train(call, media or routes.MEDIA_JSON)


async def _train(call: Call, media: str, *, forward_only: bool = False) -> Response:
    body = await call.body()
    head, batch = training_input(body, media, forward_only=forward_only)
    kind: OpKind = "forward" if head.forward_only else "forward_backward"
    return await submit_training(
        call, kind, head.model_id, head.seq_id, batch, body=body, media=media
    )


async def forward(call: Call) -> Response:
    """The forward pass of clients that have a route of its own for it."""
    return await _train(call, routes.MEDIA_JSON, forward_only=True)


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
    try:
        ids = decode_ids(body)
    except InputError:
        raise error from None
    if ids.seq_id is None:
        raise error
    return await submit_training(call, kind, ids.model_id, ids.seq_id, error, body=body)


async def load_weights(call: Call) -> Response:
    """Load into a model, or make a model from a checkpoint."""
    body = await call.body()
    try:
        request = decode_request(LoadWeightsRequest, body)
    except InputError as error:
        return await _refused_in_turn(call, "load_weights", body, error)
    owners = await readers(call, request.weights_access_token)
    if call.access.project_id is not None:
        await readable(call, request.path, owners)
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
    body = await call.body()
    request = decode_request(CreateCustomLossRequest, body or b"{}")
    session = await call.live_session(request.session_id)
    if not request.graph.nodes:
        raise refuse(400, "graph.nodes must have at least one node.")
    loss_id = f"{session.session_id}:loss:{request.custom_loss_seq_id}"
    await call.parts.limits.add_loss(
        StoredLoss(
            loss_id=loss_id,
            owner=call.owner,
            session_id=session.session_id,
            inputs=tuple(request.inputs),
            graph=request.graph,
            size_bytes=len(body),
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
