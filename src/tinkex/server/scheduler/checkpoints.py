"""Saving: named checkpoints, exports, and weights published for a sampling client.

A save that runs again after a crash writes the same location and finds its own record, so it
happens once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tinkex.errors import RequestFailedError, StorageError
from tinkex.server.age import check_recipients
from tinkex.server.store.records import AuditEntry, LimitReached, StoredCheckpoint, StoredSampler
from tinkex.types import (
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
)
from tinkex.types.bounds import METADATA_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.server.scheduler.engine_access import EngineAccess, Epoch
    from tinkex.server.scheduler.room import Room
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import CheckpointKind, LoadOrder, Model, Operation
    from tinkex.types import (
        SaveWeightsExternalRequest,
        SaveWeightsForSamplerRequest,
        SaveWeightsRequest,
    )

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")
# How many recent checkpoints are searched for the expected size of the next.
_RECENT = 20


def failure(message: str) -> RequestFailedError:
    """The caller's own mistake, found while running."""
    return RequestFailedError(message, None, "user")


def check_name(name: str) -> None:
    """Refuse checkpoint names that could not be a path's last part."""
    if not _NAME.fullmatch(name):
        raise failure(
            f"checkpoint name {name!r} is not possible: use up to 128 letters, digits, "
            "dots, dashes and underscores, starting with a letter or digit"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """Refuse lifetimes outside an hour to ten years."""
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise failure(
            f"ttl_seconds must lie between {MIN_TTL_S} (an hour) and {MAX_TTL_S} (ten years), "
            f"not {ttl_seconds}; leave it out to keep the checkpoint"
        )


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse more than is kept with a checkpoint."""
    size = len(msgspec.json.encode(dict(metadata or {})))
    if size > METADATA_BYTES:
        raise failure(f"user_metadata has {size} bytes as JSON; it may have {METADATA_BYTES}")


def is_readable(checkpoint: StoredCheckpoint, owners: Sequence[str], now: float) -> bool:
    """Whether a checkpoint is there for these owners: published or theirs, and not expired."""
    return (checkpoint.public or checkpoint.owner in owners) and is_live(checkpoint, now)


def check_sampleable(checkpoint: StoredCheckpoint) -> None:
    """Refuse what is encrypted: only the owner of the key may read its files."""
    if checkpoint.age_recipients is not None:
        raise failure(
            f"{checkpoint.path} is an encrypted export, which is only downloaded; sample from what "
            "save_weights_for_sampler returned"
        )


def check_loadable(checkpoint: StoredCheckpoint, *, optimizer: bool) -> None:
    """Refuse what cannot be trained from, naming the call that makes what can."""
    if checkpoint.kind == "external_weights":
        raise failure(f"{checkpoint.path} is an export; train from what save_state returned")
    if optimizer and not checkpoint.has_optimizer:
        raise failure(
            f"{checkpoint.path} has no optimizer state; load it without the optimizer, or save "
            "with save_state"
        )


def is_live(checkpoint: StoredCheckpoint, now: float) -> bool:
    """Whether a checkpoint has not expired."""
    return checkpoint.expires_at is None or checkpoint.expires_at > now


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Saves models that the engine has; holds nothing of its own."""

    store: Store
    access: EngineAccess
    samplers: PublishedSamplers
    clock: Clock
    room: Room
    max_samplers: int

    async def state(
        self, op: Operation, model: Model, request: SaveWeightsRequest, epoch: Epoch
    ) -> SaveWeightsResponse:
        """Weights and optimizer, to be trained on."""
        saved = await self._save(
            op,
            model,
            "weights",
            epoch,
            name=request.path or f"{op.seq_id:06d}",
            ttl_seconds=request.ttl_seconds,
            metadata=request.user_metadata,
            overwrite=request.overwrite,
        )
        return SaveWeightsResponse(path=saved.path, type="save_weights")

    async def for_sampler(
        self,
        op: Operation,
        model: Model,
        request: SaveWeightsForSamplerRequest,
        epoch: Epoch,
    ) -> tuple[SaveWeightsForSamplerResponseInternal, StoredSampler | None]:
        """Weights to sample from: under a name, or as a sampler of this session."""
        if request.path is None and request.sampling_session_seq_id is not None:
            sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
            sampler = await self._publish(op, model, sampler_id, epoch)
            response = SaveWeightsForSamplerResponseInternal(
                sampling_session_id=sampler_id, type="save_weights_for_sampler"
            )
            return response, sampler
        saved = await self._save(
            op,
            model,
            "sampler_weights",
            epoch,
            name=request.path or f"{op.seq_id:06d}",
            ttl_seconds=request.ttl_seconds,
            metadata=request.user_metadata,
        )
        response = SaveWeightsForSamplerResponseInternal(
            path=saved.path, type="save_weights_for_sampler"
        )
        return response, None

    async def _publish(
        self, op: Operation, model: Model, sampler_id: str, epoch: Epoch
    ) -> StoredSampler:
        sampler = StoredSampler(
            sampler_id=sampler_id,
            owner=model.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created_at=self.clock.wall(),
            snapshot=sampler_id,
            model_id=model.model_id,
            seq_id=op.seq_id,
        )
        known = await self.store.get_sampler(sampler_id)
        if known is not None and (known.model_id, known.seq_id) != (model.model_id, op.seq_id):
            raise failure(f"sampling session {sampler_id!r} exists already; use another number")
        if known is not None and known.dropped is not None:
            return known  # it was published before a crash, and its session has ended since
        expected = self.samplers.expected_bytes(model.model_id)
        async with self.room.reserved(model.owner, expected):
            await self.samplers.publish(sampler, epoch)
            try:
                kept = await self.store.add_sampler(sampler, max_samplers=self.max_samplers)
            except BaseException:
                # Without a record nothing would ever drop it.
                await self.samplers.withdraw(sampler)
                raise
        if isinstance(kept, LimitReached) or kept.dropped is not None:
            await self.samplers.withdraw(sampler)
        if isinstance(kept, LimitReached):
            raise failure(
                f"the session {model.session_id!r} has {kept.have} samplers; a session may have "
                f"{self.max_samplers} here (max_samplers): start another session"
            )
        return kept

    async def external(
        self,
        op: Operation,
        model: Model,
        request: SaveWeightsExternalRequest,
        epoch: Epoch,
    ) -> SaveWeightsExternalResponseInternal:
        """Weights to download. They are encrypted when they are downloaded."""
        given = request.age_encryption_recipients
        saved = await self._save(
            op,
            model,
            "external_weights",
            epoch,
            name=request.path,
            ttl_seconds=request.ttl_seconds,
            age_recipients=None if given is None else check_recipients(given),
        )
        return SaveWeightsExternalResponseInternal(
            path=saved.path, size_bytes=saved.size_bytes, type="save_weights_external"
        )

    async def _save(
        self,
        op: Operation,
        model: Model,
        kind: CheckpointKind,
        epoch: Epoch,
        *,
        name: str,
        ttl_seconds: int | None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        age_recipients: tuple[str, ...] | None = None,
    ) -> StoredCheckpoint:
        check_name(name)
        check_ttl(ttl_seconds)
        check_metadata(metadata)
        path = f"tinker://{model.model_id}/{kind}/{name}"
        # The seq_id in the location keeps samplers of an overwritten name on what they had.
        location = f"{path}@{op.seq_id}"
        old = await self.store.get_checkpoint(path)
        if old is not None and old.location == location:
            return old
        live = old is not None and is_live(old, self.clock.wall())
        if live and not overwrite:
            how = "pass overwrite=True or " if kind == "weights" else ""
            raise failure(f"{path} exists already; {how}choose another name")
        replaced_bytes = old.size_bytes if old and live else 0
        expected = await self._expected_bytes(model, kind)
        room = self.room.reserved(
            model.owner, expected, replaced_bytes=replaced_bytes, checkpoints=1
        )
        now = self.clock.wall()
        record = partial(
            StoredCheckpoint,
            path=path,
            owner=model.owner,
            model_id=model.model_id,
            kind=kind,
            name=name,
            location=location,
            base_model=model.base_model,
            lora=model.lora,
            optimizer=model.optimizer,
            created_at=now,
            user_metadata=dict(metadata) if metadata is not None else None,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            project_id=model.project_id,
            age_recipients=age_recipients,
        )
        async with room as reservation:
            size_bytes, has_optimizer = await self._write(model, kind, location, epoch)
            checkpoint = record(size_bytes=size_bytes, has_optimizer=has_optimizer)
            try:
                async with reservation.spent(size_bytes):
                    await self.store.put_checkpoint(checkpoint)
            except RequestFailedError:
                await self.access.engine.delete_saved(location)
                raise
        if old is not None:
            await self.forget_location(old.location)
        await self.store.audit(
            AuditEntry(
                at=now,
                owner=model.owner,
                topic="checkpoints",
                event="checkpoint_created",
                details={"model_id": model.model_id, "tinker_path": path},
            )
        )
        return checkpoint

    async def _write(
        self,
        model: Model,
        kind: CheckpointKind,
        location: str,
        epoch: Epoch,
    ) -> tuple[int, bool]:
        save = self.access.engine.save_adapter(
            model.model_id, location, optimizer=kind == "weights"
        )
        try:
            saved = await self.access.guard(epoch, save)
        except StorageError as error:
            # The client decides whether to continue without this checkpoint. The path stays out of
            # the message: clients need not know where the server keeps its files.
            why = str(error).replace(error.path, "the file") if error.path else str(error)
            raise RequestFailedError(
                f"the checkpoint could not be stored: {why}", None, "server"
            ) from error
        return saved.size_bytes, saved.has_optimizer

    async def loadable(self, order: LoadOrder, model: Model) -> StoredCheckpoint:
        """What a model is to be loaded from; raises why it cannot be."""
        checkpoint = await self.store.get_checkpoint(order.path)
        if checkpoint is None or not is_readable(checkpoint, order.readers, self.clock.wall()):
            raise failure(f"there is no checkpoint {order.path!r}")
        check_loadable(checkpoint, optimizer=order.optimizer)
        if checkpoint.base_model != model.base_model:
            raise failure(
                f"{order.path} was trained on {checkpoint.base_model}, "
                f"this model is on {model.base_model}"
            )
        return checkpoint

    async def _expected_bytes(self, model: Model, kind: CheckpointKind) -> int:
        """The expected size of a checkpoint: that of a recent one of the same shape, or 0."""
        recent = await self.store.checkpoints(owner=model.owner, kinds=(kind,), limit=_RECENT)
        shape = (model.base_model, model.lora)
        return next((c.size_bytes for c in recent if (c.base_model, c.lora) == shape), 0)

    async def forget_location(self, location: str) -> None:
        """Delete saved weights, unless a sampler of an active session was made for them."""
        for sampler in await self.store.samplers(location=location):
            session = await self.store.get_session(sampler.session_id)
            if session is not None and session.active:
                return
        await self.access.engine.delete_saved(location)
