"""Attach: a new program takes over an open model whose own program is gone.

A model belongs to one session at a time. It moves when its session has been silent for
`attach_after_s`; of two programs that attach at once, one succeeds. What the old program had
submitted stays accepted and runs. What it submits from then on is refused, because two programs
would use the same numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from tinkex.errors import InputError
from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import live_checkpoints
from tinkex.server.api.errors import refuse
from tinkex.types import SaveWeightsForSamplerRequest, SessionCancelled
from tinkex.wire import routes
from tinkex.wire.bodies import AttachModelRequest, AttachModelResponse
from tinkex.wire.json_requests import decode_request

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.errors import APIStatusError
    from tinkex.server.api.call import Call, Handler
    from tinkex.server.store.records import Model, Operation, Session

# More numbers than this are never in flight; a client may claim any number it likes.
_MOST_NUMBERS = 10_000


async def attach_model(call: Call) -> Response:
    """Move a model to the caller's session; asked again by the same session, say it again."""
    request = await call.json(AttachModelRequest)
    model = await call.model(request.model_id)
    session = await call.live_session(request.session_id)
    if model.closed:
        raise await _closed(call, model)
    if model.session_id != session.session_id:
        await _take_over(call, model, session)
    return reply(
        AttachModelResponse(
            model_id=model.model_id,
            next_seq_id=await call.worker.next_turn(model.model_id),
            base_model=model.base_model,
            lora_config=model.lora,
            optimizer_config=model.optimizer,
        )
    )


async def _take_over(call: Call, model: Model, session: Session) -> None:
    old = await call.store.get_session(model.session_id)
    if old is None or not old.active:
        raise await _closed(call, model)
    silent_s = call.now() - max(old.last_seen_at, model.last_request_at)
    wait_s = math.ceil(call.settings.attach_after_s - silent_s)
    if wait_s > 0:
        raise _taken(
            f"Another program is training model {model.model_id!r}; the server heard from it "
            f"{silent_s:.0f} s ago. End that program first. If it has already ended, attach "
            f"again in {wait_s} s."
        )
    # Whole or not at all: a caller that goes away half-way would leave the old session open.
    with anyio.CancelScope(shield=True):
        if not await call.worker.changes.move_model(model, session.session_id):
            raise _taken(
                f"Another program has just attached to model {model.model_id!r}, or its session "
                "has just ended."
            )
        await _settle_numbers(call, model.model_id)
        await _end(call, old, model.model_id, session.session_id)


async def _settle_numbers(call: Call, model_id: str) -> None:
    """Nothing waits for what the old program will not send any more.

    Weights it wanted to sample from are not published: their sampler would take a number of the
    new session.
    """
    last = await call.worker.next_turn(model_id) - 1
    for seq_id in range(last, max(last - _MOST_NUMBERS, 0), -1):
        operation = await call.store.get_operation(f"{model_id}:{seq_id}")
        if operation is None:
            call.worker.give_turn_back(model_id, seq_id)
        elif operation.started_at is not None:
            return  # everything before it has had its turn
        elif _publishes(operation):
            await call.worker.cancel(operation)


def _publishes(operation: Operation) -> bool:
    if operation.kind != "save_weights_for_sampler" or operation.state == "done":
        return False
    try:
        return decode_request(SaveWeightsForSamplerRequest, operation.body).path is None
    except InputError:
        return False  # it fails in its turn


async def _end(call: Call, old: Session, model_id: str, session_id: str) -> None:
    """End the old session unless it has another open model."""
    models = await call.store.models(session_id=old.session_id)
    if any(not model.closed for model in models):
        return
    status = SessionCancelled(detail=f"session {session_id} attached to model {model_id}")
    await call.worker.end_session(old, status)


async def _closed(call: Call, model: Model) -> APIStatusError:
    saved = await live_checkpoints(call, model.model_id)
    last = next((c for c in saved if c.kind == "weights"), None)
    if last is None:
        advice = "It has no checkpoint to continue from."
    else:
        advice = (
            f"Its last checkpoint is {last.path}; load it with "
            "create_training_client_from_state_with_optimizer."
        )
    return refuse(410, f"Model {model.model_id!r} is closed. {advice}")


def _taken(detail: str) -> APIStatusError:
    # The state does not change within a client's retries.
    return refuse(409, detail, headers={"x-should-retry": "false"})


HANDLERS: dict[str, Handler] = {routes.ATTACH_MODEL.name: attach_model}
