"""Models, which are training runs: create, describe, list, unload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import describe, published
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import as_strings, open_session, when
from tinkex.server.api.submit import accepted, submit_training
from tinkex.server.store.records import Model, Operation
from tinkex.types import (
    CreateModelRequest,
    Cursor,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    TrainingRun,
    TrainingRunsResponse,
    UnloadModelRequest,
)
from tinkex.wire import routes
from tinkex.wire.json_codec import decode_object, encode
from tinkex.wire.json_requests import decode_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from tinkex.server.api.call import Call, Handler
    from tinkex.types import Checkpoint

MAX_RANK = 1024


async def create_model(call: Call) -> Response:
    """Start a training run. Clients before sessions get one made for them."""
    body = decode_object(await call.body())
    if body.get("session_id") is None:
        key = call.header("x-idempotency-key") or call.parts.new_id()
        known = await call.store.recall(call.owner, key)
        if known is None:
            known = (await open_session(call, heartbeats=False)).session_id
            await call.store.remember(call.owner, key, known)
        body = {**body, "session_id": known, "model_seq_id": 0}
    return await _create(call, decode_request(CreateModelRequest, encode(body)))


async def _create(call: Call, request: CreateModelRequest) -> Response:
    spec = call.base_model(request.base_model)
    lora = request.lora_config or LoraConfig(rank=32)
    _check_lora(lora)
    session = await call.live_session(request.session_id)
    model_id = f"{session.session_id}:train:{request.model_seq_id}"
    if await call.store.get_model(model_id) is None:
        await call.parts.limits.model(call.owner)
    now = call.now()
    model = await call.store.add_model(
        Model(
            model_id=model_id,
            owner=call.owner,
            session_id=session.session_id,
            base_model=spec.name,
            lora=lora,
            optimizer=request.optimizer_config,
            created_at=now,
            last_request_at=now,
            user_metadata=as_strings(request.user_metadata),
            project_id=session.project_id,
        )
    )
    operation = Operation(
        op_id=f"{model.model_id}:0",
        kind="create_model",
        owner=call.owner,
        session_id=session.session_id,
        created_at=now,
        body=encode(request),
        request=request,
        model_id=model.model_id,
    )
    return accepted(await call.worker.submit(operation))


def _check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise refuse(400, f"lora_config.rank must lie between 1 and {MAX_RANK}, not {lora.rank}.")
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise refuse(400, "lora_config trains nothing: set train_mlp, train_attn or train_unembed.")


async def get_info(call: Call) -> Response:
    """What a client needs to know about its model."""
    request = await call.json(GetInfoRequest)
    model = await call.model(request.model_id)
    spec = call.base_model(model.base_model)
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
    """The caller's runs, newest first; on request also those with something published."""
    offset, limit = call.number("offset", 0), call.number("limit", 20)
    project = call.request.query_params.get("project_id")
    total = await call.store.count_models(call.owner, project_id=project)
    if _others_too(call):
        others = await _published_by_others(call, project)
        found = [*await _own(call, project, 0, offset + limit), *others]
        found.sort(key=lambda model: model.created_at, reverse=True)
        page, total = found[offset : offset + limit], total + len(others)
    else:
        page = await _own(call, project, offset, limit)
    runs = await _runs(call, page)
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return reply(TrainingRunsResponse(training_runs=runs, cursor=cursor))


async def _own(call: Call, project: str | None, offset: int, limit: int) -> Sequence[Model]:
    return await call.store.models(owner=call.owner, project_id=project, offset=offset, limit=limit)


async def _published_by_others(call: Call, project: str | None) -> list[Model]:
    runs = dict.fromkeys(c.model_id for c in await published(call) if c.owner != call.owner)
    found = [await call.store.get_model(run) for run in runs]
    return [m for m in found if m is not None and project in (None, m.project_id)]


async def get_training_run(call: Call) -> Response:
    """One run; on request also somebody else's with something published."""
    run = call.param("run")
    shared = await call.store.get_model(run) if _others_too(call) else None
    if shared is None or not await published(call, run):
        shared = await call.model(run)
    (found,) = await _runs(call, [shared])
    return reply(found)


def _others_too(call: Call) -> bool:
    return call.request.query_params.get("access_scope") == "accessible"


async def _runs(call: Call, models: Sequence[Model]) -> list[TrainingRun]:
    """Runs as the caller may see them: of somebody else's, only what is published."""
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


HANDLERS: dict[str, Handler] = {
    routes.CREATE_MODEL.name: create_model,
    routes.GET_INFO.name: get_info,
    routes.UNLOAD_MODEL.name: unload_model,
    routes.LIST_TRAINING_RUNS.name: list_training_runs,
    routes.GET_TRAINING_RUN.name: get_training_run,
}
