"""Saved weights: list, describe, publish, expire, delete, copy, download."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from starlette.responses import RedirectResponse, Response

from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import when
from tinkex.server.scheduler.jobs import check_ttl
from tinkex.server.store.records import AuditEntry, Model
from tinkex.types import (
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
    WeightsInfoResponse,
)
from tinkex.wire import routes
from tinkex.wire.bodies import ArchiveUrlResponse, SetTtlRequest, WeightsInfoRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.server.api.call import Call, Handler
    from tinkex.server.store.records import CheckpointKind, StoredCheckpoint

_TYPES: dict[CheckpointKind, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def describe(checkpoint: StoredCheckpoint) -> Checkpoint:
    """A checkpoint as listings show it."""
    metadata = checkpoint.user_metadata
    return Checkpoint(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type=_TYPES[checkpoint.kind],
        time=when(checkpoint.created_at),
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=None if metadata is None else dict(metadata),
        expires_at=None if checkpoint.expires_at is None else when(checkpoint.expires_at),
    )


async def live_checkpoints(call: Call, model_id: str | None = None) -> list[StoredCheckpoint]:
    """The caller's checkpoints that have not expired, newest first."""
    found = await call.store.checkpoints(owner=call.owner, model_id=model_id)
    return [c for c in found if c.expires_at is None or c.expires_at > call.now()]


def readers(call: Call, token: str | None) -> tuple[str, ...]:
    """Whose weights the caller may read: its own, and those a token gives access to."""
    token = token or call.header("x-tinker-weights-access-token")
    return (call.owner, call.parts.identity.owner(token)) if token else (call.owner,)


async def readable(call: Call, path: str, owners: tuple[str, ...]) -> StoredCheckpoint:
    """A checkpoint that these owners may read; others are told that there is none."""
    checkpoint = await call.store.get_checkpoint(path)
    if (
        checkpoint is None
        or not (checkpoint.public or checkpoint.owner in owners)
        or (checkpoint.expires_at is not None and checkpoint.expires_at <= call.now())
    ):
        raise refuse(404, f"There is no checkpoint {path!r}.")
    return checkpoint


async def _own(call: Call) -> StoredCheckpoint:
    """The caller's checkpoint that the path of the request names."""
    run, checkpoint_id = call.param("run"), call.param("ckpt")
    checkpoint = await readable(call, f"tinker://{run}/{checkpoint_id}", (call.owner,))
    if checkpoint.owner != call.owner:
        raise refuse(404, f"There is no checkpoint {checkpoint_id!r} of {run!r}.")
    return checkpoint


async def _audit(call: Call, event: str, checkpoint: StoredCheckpoint) -> None:
    details = {"model_id": checkpoint.model_id, "tinker_path": checkpoint.path}
    await call.store.audit(
        AuditEntry(
            at=call.now(), owner=call.owner, topic="checkpoints", event=event, details=details
        )
    )


async def list_checkpoints(call: Call) -> Response:
    """All of the caller's checkpoints, page by page."""
    offset, limit = call.number("offset", 0), call.number("limit", 100)
    found = await live_checkpoints(call)
    cursor = Cursor(offset=offset, limit=limit, total_count=len(found))
    page = [describe(c) for c in found[offset : offset + limit]]
    return reply(CheckpointsListResponse(checkpoints=page, cursor=cursor))


async def list_run_checkpoints(call: Call) -> Response:
    """The checkpoints of one run."""
    model = await call.model(call.param("run"))
    found = await live_checkpoints(call, model.model_id)
    return reply(CheckpointsListResponse(checkpoints=[describe(c) for c in found]))


async def delete_checkpoint(call: Call) -> Response:
    """Delete; samplers made before keep what they have."""
    checkpoint = await _own(call)
    await call.store.delete_checkpoint(checkpoint.path)
    await call.worker.jobs.forget_location(checkpoint.location)
    await _audit(call, "checkpoint_deleted", checkpoint)
    return reply()


async def publish_checkpoint(call: Call) -> Response:
    """Let everybody read a checkpoint; publishing twice is fine."""
    return await _set_public(call, True)


async def unpublish_checkpoint(call: Call) -> Response:
    """Make a checkpoint private again."""
    return await _set_public(call, False)


async def _set_public(call: Call, public: bool) -> Response:
    checkpoint = await _own(call)
    if checkpoint.public != public:
        await call.store.put_checkpoint(replace(checkpoint, public=public))
        event = "checkpoint_published" if public else "checkpoint_unpublished"
        await _audit(call, event, checkpoint)
    return reply()


async def set_checkpoint_ttl(call: Call) -> Response:
    """Set when a checkpoint expires, counted from now; null keeps it for ever."""
    request = await call.json(SetTtlRequest)
    checkpoint = await _own(call)
    check_ttl(request.ttl_seconds)
    ttl_s = request.ttl_seconds
    expires_at = None if ttl_s is None else call.now() + ttl_s
    await call.store.put_checkpoint(replace(checkpoint, expires_at=expires_at))
    await _audit(call, "checkpoint_ttl_set", checkpoint)
    return reply()


async def weights_info(call: Call) -> Response:
    """What is needed to build a model that fits a checkpoint."""
    request = await call.json(WeightsInfoRequest)
    checkpoint = await readable(call, request.tinker_path, readers(call, None))
    lora = checkpoint.lora
    return reply(
        WeightsInfoResponse(
            base_model=checkpoint.base_model,
            optimizer_config=checkpoint.optimizer,
            is_lora=True,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )
    )


async def copy_weights(call: Call) -> Response:
    """Copy a checkpoint into a run of the caller's own; copies do not expire with it."""
    request = await call.json(CopyWeightsRequest)
    key = call.header("x-idempotency-key")
    if key and (known := await call.store.recall(call.owner, f"copy:{key}")) is not None:
        return reply(CopyWeightsResponse(tinker_path=known))
    check_ttl(request.ttl_seconds)
    source = await readable(call, request.source_path, readers(call, request.weights_access_token))
    now = call.now()
    run = await _copy_target(call, request, source)
    path = f"tinker://{run.model_id}/{source.kind}/{source.name}"
    copy = replace(
        source,
        path=path,
        owner=call.owner,
        model_id=run.model_id,
        location=f"{path}@copy-{call.parts.new_id()}",
        created_at=now,
        public=False,
        expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
        project_id=run.project_id,
    )
    await call.parts.engine.copy_saved(source.location, copy.location)
    await call.store.put_checkpoint(copy)
    await _audit(call, "checkpoint_copied", copy)
    if key:
        await call.store.remember(call.owner, f"copy:{key}", path)
    return reply(CopyWeightsResponse(tinker_path=path))


async def _copy_target(call: Call, request: CopyWeightsRequest, source: StoredCheckpoint) -> Model:
    if request.session_id is not None:
        await call.live_session(request.session_id)
    session_id = request.session_id or f"copy-{call.parts.new_id()}"
    now = call.now()
    return await call.store.add_model(
        Model(
            model_id=f"{session_id}:train:{request.model_seq_id or 0}",
            owner=call.owner,
            session_id=session_id,
            base_model=source.base_model,
            lora=source.lora,
            optimizer=source.optimizer,
            created_at=now,
            last_request_at=now,
            project_id=request.destination_project_id,
        )
    )


async def get_external_weights_urls(call: Call) -> Response:
    """A signed link per file of an export."""
    checkpoint = await _own(call)
    if checkpoint.kind != "external_weights":
        raise refuse(
            400, f"{checkpoint.path} is no export; make one with save_weights_external first."
        )
    files = await call.parts.engine.export_saved(checkpoint.location)
    token, expires = call.parts.identity.make_link(
        {"kind": "file", "location": checkpoint.location}
    )
    urls = {name: call.link(f"{routes.PREFIX}/files/{token}/{name}") for name in files}
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=when(expires)))


async def get_checkpoint_archive(call: Call) -> Response:
    """One tar of a checkpoint: a redirect for old clients, a link in JSON for newer ones."""
    checkpoint = await _own(call)
    token, expires = call.parts.identity.make_link(
        {"kind": "archive", "location": checkpoint.location}
    )
    url = call.link(f"{routes.PREFIX}/files/{token}/archive.tar")
    if "json" in call.header("accept"):
        return reply(ArchiveUrlResponse(url=url, expires=when(expires)))
    stamp = when(expires).strftime("%a, %d %b %Y %H:%M:%S GMT")
    return RedirectResponse(url, status_code=302, headers={"expires": stamp})


def make_tar(files: Mapping[str, bytes]) -> bytes:
    """A plain tar with the files side by side."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


HANDLERS: dict[str, Handler] = {
    routes.LIST_CHECKPOINTS.name: list_checkpoints,
    routes.LIST_RUN_CHECKPOINTS.name: list_run_checkpoints,
    routes.LIST_MODEL_CHECKPOINTS.name: list_run_checkpoints,
    routes.DELETE_CHECKPOINT.name: delete_checkpoint,
    routes.PUBLISH_CHECKPOINT.name: publish_checkpoint,
    routes.UNPUBLISH_CHECKPOINT.name: unpublish_checkpoint,
    routes.SET_CHECKPOINT_TTL.name: set_checkpoint_ttl,
    routes.WEIGHTS_INFO.name: weights_info,
    routes.COPY_WEIGHTS.name: copy_weights,
    routes.GET_EXTERNAL_WEIGHTS_URLS.name: get_external_weights_urls,
    routes.GET_CHECKPOINT_ARCHIVE.name: get_checkpoint_archive,
}
