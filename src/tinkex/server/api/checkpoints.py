"""Saved weights: list, describe, publish, expire, delete, copy; and who may read them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tinkex.errors import AuthenticationError, TinkerError, quoted
from tinkex.server.api.audit import note
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import when
from tinkex.server.api.submit import new_run
from tinkex.server.scheduler.checkpoints import check_ttl, is_live, is_readable
from tinkex.types import (
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    Cursor,
    WeightsInfoResponse,
)
from tinkex.types.bounds import LISTED_RECORDS, PAGE_OFFSET
from tinkex.wire.bodies import SetTtlRequest, WeightsInfoRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.responses import Response

    from tinkex.errors import APIStatusError
    from tinkex.server.api.call import Call
    from tinkex.server.store.records import CheckpointKind, Model, StoredCheckpoint

_log = logging.getLogger(__name__)

# The last minor version of the official client that knows no exports.
_LAST_WITHOUT_EXPORTS = 25
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


async def live_checkpoints(
    call: Call, model_id: str | None = None, kinds: Collection[CheckpointKind] | None = None
) -> Sequence[StoredCheckpoint]:
    """The caller's checkpoints that have not expired, newest first."""
    return await call.store.checkpoints(
        owner=call.owner,
        model_id=model_id,
        kinds=kinds,
        live_at=call.now(),
        project_id=call.access.project_id,
        limit=LISTED_RECORDS,
    )


async def published(call: Call, model_id: str) -> Sequence[StoredCheckpoint]:
    """The checkpoints of a run that are public, newest first."""
    return await call.store.checkpoints(
        model_id=model_id, public=True, live_at=call.now(), limit=LISTED_RECORDS
    )


async def readers(call: Call, token: str | None) -> tuple[str, ...]:
    """Whose weights the caller may read: its own, and those a token gives access to.

    An access token is a key of the weights' owner, or a token made from one. Here it only gives
    read access.
    """
    token = token or call.header("x-tinker-weights-access-token")
    if not token:
        return (call.owner,)
    try:
        caller = await call.parts.identity.caller(token, call.address)
        if caller.access.project_id is not None or caller.access.routes is not None:
            raise caller.access.refusal("This key gives no access to others.")
        return (call.owner, caller.owner)
    except AuthenticationError as error:
        raise refuse(
            403,
            "The weights access token is not valid here, or no longer; ask the owner of the "
            "weights for one, which is an API key or a token made from it.",
        ) from error


async def readable(call: Call, path: str, owners: tuple[str, ...]) -> StoredCheckpoint:
    """A checkpoint that these owners may read; a 404 for any other."""
    checkpoint = await call.store.get_checkpoint(path)
    if checkpoint is None or not is_readable(checkpoint, owners, call.now()):
        raise _gone(path)
    if checkpoint.owner == call.owner and call.hides(checkpoint.project_id):
        raise _gone(path)
    return checkpoint


def _gone(path: str) -> APIStatusError:
    """The same reply for a checkpoint that does not exist and for one of another owner."""
    return refuse(404, f"There is no checkpoint {quoted(path)}.")


async def named(call: Call) -> StoredCheckpoint:
    """The checkpoint that the path of the request names, if the caller may read it."""
    path = f"tinker://{call.param('run')}/{call.param('ckpt')}"
    return await readable(call, path, await readers(call, None))


async def _own(call: Call) -> StoredCheckpoint:
    """The same, if the caller may change it."""
    checkpoint = await named(call)
    if checkpoint.owner != call.owner:
        raise _gone(checkpoint.path)
    return checkpoint


async def audit(call: Call, event: str, checkpoint: StoredCheckpoint) -> None:
    """Write an event of a checkpoint to the audit log."""
    details = {"model_id": checkpoint.model_id, "tinker_path": checkpoint.path}
    await note(call, "checkpoints", event, **details)


async def list_checkpoints(call: Call) -> Response:
    """All of the caller's checkpoints, page by page."""
    offset = call.number("offset", 0, most=PAGE_OFFSET)
    limit = min(call.number("limit", 100), LISTED_RECORDS)
    kinds, now = _known_kinds(call), call.now()
    found = await call.store.checkpoints(
        owner=call.owner,
        kinds=kinds,
        live_at=now,
        offset=offset,
        limit=limit,
        project_id=call.access.project_id,
    )
    total = await call.store.count_checkpoints(
        call.owner, kinds=kinds, live_at=now, project_id=call.access.project_id
    )
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    page = [describe(c) for c in found]
    return reply(CheckpointsListResponse(checkpoints=page, cursor=cursor))


async def list_run_checkpoints(call: Call) -> Response:
    """The checkpoints of one run; of another owner's run, those that are public."""
    run, kinds = call.param("run"), _known_kinds(call)
    found = await published(call, run)
    if not found or found[0].owner == call.owner:
        found = await live_checkpoints(call, (await call.model(run)).model_id, kinds)
    else:
        found = [c for c in found if c.kind in kinds]
    return reply(CheckpointsListResponse(checkpoints=[describe(c) for c in found]))


# The name of the same route in older clients.
list_model_checkpoints = list_run_checkpoints


def _known_kinds(call: Call) -> list[CheckpointKind]:
    """Without exports for clients older than those: they refuse a listing that has one."""
    version = re.match(r"0\.(\d{1,9})\.", call.header("x-stainless-package-version"))
    older = version is not None and int(version[1]) <= _LAST_WITHOUT_EXPORTS
    return [kind for kind in _TYPES if not (older and kind == "external_weights")]


async def delete_checkpoint(call: Call) -> Response:
    """Delete; samplers made before keep what they have."""
    await call.at_engine()
    checkpoint = await _own(call)
    # It expires now, whatever becomes of its files; the upkeep retries what fails below.
    if not await call.store.change_checkpoint(checkpoint, expires_at=call.now()):
        raise _gone(checkpoint.path)
    await audit(call, "checkpoint_deleted", checkpoint)
    try:
        await call.worker.checkpoints.forget_location(checkpoint.location)
        await call.store.delete_checkpoint(checkpoint)
    except TinkerError as error:
        _log.warning("%s will be deleted later: %s", checkpoint.path, error)
    return reply()


async def publish_checkpoint(call: Call) -> Response:
    """Make a checkpoint public; publishing twice is fine."""
    return await _set_public(call, True)


async def unpublish_checkpoint(call: Call) -> Response:
    """Make a checkpoint private again."""
    return await _set_public(call, False)


async def _set_public(call: Call, public: bool) -> Response:
    checkpoint = await _own(call)
    if checkpoint.public != public:
        if not await call.store.change_checkpoint(checkpoint, public=public):
            raise _gone(checkpoint.path)
        event = "checkpoint_published" if public else "checkpoint_unpublished"
        await audit(call, event, checkpoint)
    return reply()


async def set_checkpoint_ttl(call: Call) -> Response:
    """Set when a checkpoint expires, counted from now; null keeps it for ever."""
    request = await call.json(SetTtlRequest)
    checkpoint = await _own(call)
    check_ttl(request.ttl_seconds)
    ttl_s = request.ttl_seconds
    expires_at = None if ttl_s is None else call.now() + ttl_s
    if not await call.store.change_checkpoint(checkpoint, expires_at=expires_at):
        raise _gone(checkpoint.path)
    await audit(call, "checkpoint_ttl_set", checkpoint)
    return reply()


async def weights_info(call: Call) -> Response:
    """What is needed to build a model that fits a checkpoint."""
    request = await call.json(WeightsInfoRequest)
    checkpoint = await readable(call, request.tinker_path, await readers(call, None))
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
    await call.at_engine()
    key = call.idempotency_key()
    if key and (known := await call.store.recall(call.owner, f"copy:{key}")) is not None:
        return reply(CopyWeightsResponse(tinker_path=known))
    check_ttl(request.ttl_seconds)
    owners = await readers(call, request.weights_access_token)
    source = await readable(call, request.source_path, owners)
    room = call.worker.room.reserved(call.owner, source.size_bytes, checkpoints=1)
    async with room as reservation:
        copy = await _copy(call, request, source)
        async with reservation.spent(copy.size_bytes):
            await call.store.put_checkpoint(copy)
    await audit(call, "checkpoint_copied", copy)
    if key:
        await call.store.remember(call.owner, f"copy:{key}", copy.path)
    return reply(CopyWeightsResponse(tinker_path=copy.path))


async def _copy(
    call: Call, request: CopyWeightsRequest, source: StoredCheckpoint
) -> StoredCheckpoint:
    now = call.now()
    run = await _copy_target(call, request, source)
    path = f"tinker://{run.model_id}/{source.kind}/{source.name}"
    there = await call.store.get_checkpoint(path)
    if there is not None and is_live(there, now):
        raise refuse(400, f"{path} exists already; copy into another run.")
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
    return copy


async def _copy_target(call: Call, request: CopyWeightsRequest, source: StoredCheckpoint) -> Model:
    if request.session_id is not None:
        await call.live_session(request.session_id)
    session_id = request.session_id or f"copy-{call.parts.new_id()}"
    run = new_run(call, session_id, request.model_seq_id, source.base_model, source.lora)
    # Closed from the start (`snapshot_seq`): it is listed, and nothing ever runs in it.
    return await call.parts.limits.add_model(
        replace(
            run,
            optimizer=source.optimizer,
            project_id=call.access.project(request.destination_project_id),
            snapshot_seq=0,
        )
    )
