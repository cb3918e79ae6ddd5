"""Models, which are training runs: create, describe, list, unload, attach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from tinkex.engine.protocol import MAX_RANK
from tinkex.errors import InputError
from tinkex.server.api.audit import note
from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import (
    describe,
    live_checkpoints,
    published,
)
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import as_strings, open_session, when
from tinkex.server.api.submit import new_run, submit_run, submit_training
from tinkex.types import (
    CreateModelRequest,
    Cursor,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    SaveWeightsForSamplerRequest,
    SessionCancelled,
    TrainingRun,
    TrainingRunsResponse,
    UnloadModelRequest,
)
from tinkex.types.bounds import LISTED_RECORDS, PAGE_OFFSET
from tinkex.wire.bodies import AttachModelRequest, AttachModelResponse
from tinkex.wire.json_codec import decode_object, encode
from tinkex.wire.json_requests import decode_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from tinkex.errors import APIStatusError
    from tinkex.server.api.call import Call
    from tinkex.server.store.records import Model, Operation, StoredSession
    from tinkex.types import Checkpoint


async def create_model(call: Call) -> Response:
    """Start a training run. Clients before sessions get one made for them."""
    body = decode_object(await call.body())
    old_client = body.get("session_id") is None
    if old_client:
        # Before a session is made, which another node would make again.
        await call.at_engine((await call.base_model(str(body.get("base_model")))).name)
        key = call.idempotency_key() or call.parts.new_id()
        known = await call.store.recall(call.owner, key)
        if known is None:
            opened = (await open_session(call, heartbeats=False)).session_id
            known = await call.store.remember(call.owner, key, opened)
        body = {**body, "session_id": known, "model_seq_id": 0}
    request = decode_request(CreateModelRequest, encode(body))
    return await _create(call, request, here=old_client)


async def _create(call: Call, request: CreateModelRequest, *, here: bool) -> Response:
    spec = await call.base_model(request.base_model)
    lora = request.lora_config or LoraConfig(rank=32)
    _check_lora(lora)
    session = await call.live_session(request.session_id)
    run = new_run(call, session.session_id, request.model_seq_id, spec.name, lora)
    run = replace(
        run,
        optimizer=request.optimizer_config,
        user_metadata=as_strings(request.user_metadata),
        project_id=session.project_id,
    )
    return await submit_run(call, run, "create_model", request, encode(request), here=here)


def _check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise refuse(400, f"lora_config.rank must lie between 1 and {MAX_RANK}, not {lora.rank}.")
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise refuse(400, "lora_config trains nothing: set train_mlp, train_attn or train_unembed.")


async def get_info(call: Call) -> Response:
    """What a client needs to know about its model."""
    request = await call.json(GetInfoRequest)
    model = await call.model(request.model_id)
    spec = await call.base_model(model.base_model)
    return reply(
        GetInfoResponse(
            type="get_info",
            model_data=ModelData(
                arch=spec.arch, model_name=spec.name, tokenizer_id=spec.tokenizer_id
            ),
            model_id=model.model_id,
            optimizer_config=model.optimizer,
            is_lora=True,
            lora_rank=model.lora.rank,
            model_name=spec.name,
        )
    )


async def unload_model(call: Call) -> Response:
    """Free a model, after everything submitted before."""
    request = await call.json(UnloadModelRequest)
    body = encode(request)
    return await submit_training(call, "unload_model", request.model_id, None, request, body=body)


async def list_training_runs(call: Call) -> Response:
    """The caller's runs, newest first; on request also others' runs with published checkpoints."""
    offset = call.number("offset", 0, most=PAGE_OFFSET)
    limit = min(call.number("limit", 20), LISTED_RECORDS)
    project = call.access.project(call.request.query_params.get("project_id"))
    published_at = call.now() if _others_too(call) else None
    total = await call.store.count_models(call.owner, project_id=project, published_at=published_at)
    page = await call.store.models(
        owner=call.owner, project_id=project, published_at=published_at, offset=offset, limit=limit
    )
    runs = await _runs(call, page)
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return reply(TrainingRunsResponse(training_runs=runs, cursor=cursor))


async def get_training_run(call: Call) -> Response:
    """One run; on request also another owner's with published checkpoints."""
    run = call.param("run")
    shared = await call.store.get_model(run) if _others_too(call) else None
    if shared is None or not await published(call, run):
        shared = await call.model(run)
    (found,) = await _runs(call, [shared])
    return reply(found)


def _others_too(call: Call) -> bool:
    return call.request.query_params.get("access_scope") == "accessible"


async def _runs(call: Call, models: Sequence[Model]) -> list[TrainingRun]:
    """Runs as the caller may see them: of other owners, only published checkpoints."""
    own = {model.model_id for model in models if model.owner == call.owner}
    others = {model.model_id for model in models} - own
    newest: dict[tuple[str, str], Checkpoint] = {}
    for ids, public in ((own, False), (others, True)):
        if ids:
            found = await call.store.newest_checkpoints(
                ids, kinds=("weights", "sampler_weights"), live_at=call.now(), public=public
            )
            newest.update(((each.model_id, each.kind), describe(each)) for each in found)
    return [
        TrainingRun(
            training_run_id=model.model_id,
            base_model=model.base_model,
            model_owner=model.owner,
            is_lora=True,
            corrupted=model.corrupted,
            lora_rank=model.lora.rank,
            last_request_time=when(model.last_request_at),
            last_checkpoint=newest.get((model.model_id, "weights")),
            last_sampler_checkpoint=newest.get((model.model_id, "sampler_weights")),
            user_metadata=dict(model.user_metadata) if model.model_id in own else None,
        )
        for model in models
    ]


# More numbers than this are never in flight; a client may claim any number it likes.
_MOST_NUMBERS = 10_000


# Attach: a new program takes over an open model whose own program is gone. A model belongs to one
# session at a time. It moves when its session has been silent for `attach_after_s`; of two programs
# that attach at once, one succeeds. What the old program had submitted stays accepted and runs.
# What it submits from then on is refused, because two programs would use the same numbers.


async def attach_model(call: Call) -> Response:
    """Move a model to the caller's session; a repeated request gets the same reply."""
    request = await call.json(AttachModelRequest)
    model = await call.model(request.model_id)
    session = await call.live_session(request.session_id)
    await call.own(model.model_id, model.base_model)
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


async def _take_over(call: Call, model: Model, session: StoredSession) -> None:
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
    # Shielded: a caller that disconnects in between would leave the old session open.
    with anyio.CancelScope(shield=True):
        if not await call.store.move_model(model, session.session_id):
            raise _taken(
                f"Another program has just attached to model {model.model_id!r}, or its session "
                "has just ended."
            )
        await _settle_numbers(call, model.model_id)
        await _end(call, old, model.model_id, session.session_id)


async def _settle_numbers(call: Call, model_id: str) -> None:
    """Release the numbers that the old program will not send any more.

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


async def _end(call: Call, old: StoredSession, model_id: str, session_id: str) -> None:
    """End the old session unless it has another open model."""
    models = await call.store.models(session_id=old.session_id)
    if any(not model.closed for model in models):
        return
    status = SessionCancelled(detail=f"session {session_id} attached to model {model_id}")
    if await call.worker.end_session(old, status):
        details = {"session_id": old.session_id, "attached_by": session_id}
        await note(call, "sessions", "session_finished", **details)


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
