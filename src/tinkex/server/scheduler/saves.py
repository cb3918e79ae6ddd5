"""Saving: named checkpoints, exports, and weights published for a sampling client.

A save that is run again after a crash writes the same place and finds its own record, so it
happens once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.errors import RequestFailedError, StorageError
from tinkex.server.age import check_recipients
from tinkex.server.scheduler.checks import check_name, check_ttl, failure
from tinkex.server.scheduler.quota import check_room, expected_size, is_live
from tinkex.server.store.records import AuditEntry, Sampler, StoredCheckpoint
from tinkex.types import (
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clock import Clock
    from tinkex.server.scheduler.published import Published
    from tinkex.server.scheduler.residents import Generation, Residents
    from tinkex.server.scheduler.rows import Rows
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import CheckpointKind, Model, Operation
    from tinkex.types import (
        SaveWeightsExternalRequest,
        SaveWeightsForSamplerRequest,
        SaveWeightsRequest,
    )


@dataclass(frozen=True, slots=True)
class Saves:
    """Saves models that the engine has; holds nothing of its own."""

    store: Store
    rows: Rows
    residents: Residents
    published: Published
    clock: Clock
    max_stored_bytes: int

    async def state(
        self, op: Operation, model: Model, request: SaveWeightsRequest, generation: Generation
    ) -> SaveWeightsResponse:
        """Weights and optimizer, to be trained on."""
        saved = await self._save(
            op,
            model,
            "weights",
            generation,
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
        generation: Generation,
    ) -> SaveWeightsForSamplerResponseInternal:
        """Weights to sample from: under a name, or as a sampler of this session."""
        if request.path is None and request.sampling_session_seq_id is not None:
            sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
            await self._publish(op, model, sampler_id, generation)
            return SaveWeightsForSamplerResponseInternal(
                sampling_session_id=sampler_id, type="save_weights_for_sampler"
            )
        saved = await self._save(
            op,
            model,
            "sampler_weights",
            generation,
            name=request.path or f"{op.seq_id:06d}",
            ttl_seconds=request.ttl_seconds,
            metadata=request.user_metadata,
        )
        return SaveWeightsForSamplerResponseInternal(
            path=saved.path, type="save_weights_for_sampler"
        )

    async def _publish(
        self, op: Operation, model: Model, sampler_id: str, generation: Generation
    ) -> None:
        sampler = Sampler(
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
        await self.published.publish(sampler, generation)
        await self.store.add_sampler(sampler)

    async def external(
        self,
        op: Operation,
        model: Model,
        request: SaveWeightsExternalRequest,
        generation: Generation,
    ) -> SaveWeightsExternalResponseInternal:
        """Weights to download. They are encrypted when they are downloaded."""
        given = request.age_encryption_recipients
        saved = await self._save(
            op,
            model,
            "external_weights",
            generation,
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
        generation: Generation,
        *,
        name: str,
        ttl_seconds: int | None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        age_recipients: tuple[str, ...] | None = None,
    ) -> StoredCheckpoint:
        check_name(name)
        check_ttl(ttl_seconds)
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
        size_bytes, has_optimizer = await self._write(model, kind, path, location, generation)
        now = self.clock.wall()
        checkpoint = StoredCheckpoint(
            path=path,
            owner=model.owner,
            model_id=model.model_id,
            kind=kind,
            name=name,
            location=location,
            base_model=model.base_model,
            lora=model.lora,
            optimizer=model.optimizer,
            has_optimizer=has_optimizer,
            created_at=now,
            size_bytes=size_bytes,
            user_metadata=dict(metadata) if metadata is not None else None,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            project_id=model.project_id,
            age_recipients=age_recipients,
        )
        await self.rows.put_checkpoint(checkpoint)
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
        self, model: Model, kind: CheckpointKind, path: str, location: str, generation: Generation
    ) -> tuple[int, bool]:
        kept = await self.store.checkpoints(owner=model.owner)
        size_bytes = expected_size(kept, model, kind)
        check_room(kept, self.max_stored_bytes, self.clock.wall(), size_bytes, replaces=path)
        save = self.residents.engine.save_adapter(
            model.model_id, location, optimizer=kind == "weights"
        )
        try:
            saved = await self.residents.guard(generation, save)
        except StorageError as error:
            # The client decides whether to go on without this checkpoint, and need not know
            # where the server keeps its files.
            why = str(error).replace(error.path, "the file") if error.path else str(error)
            raise RequestFailedError(
                f"the checkpoint could not be stored: {why}", None, "server"
            ) from error
        return saved.size_bytes, saved.has_optimizer

    async def forget_location(self, location: str) -> None:
        """Delete saved weights, unless a sampler of a session that goes on was made for them."""
        for sampler in await self.store.samplers():
            if sampler.location == location:
                session = await self.store.get_session(sampler.session_id)
                if session is not None and session.active:
                    return
        await self.residents.engine.delete_saved(location)
