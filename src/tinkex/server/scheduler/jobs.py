"""What each kind of operation asks of the engine, and what it leaves in the store.

A job returns the protocol's own result and what it used, or raises `RequestFailedError`
or `InputError`. When jobs run is the worker's decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tinkex.engine.base import AdapterSpec, CustomLoss, OptimOp, SampleOp, TrainOp, Weights
from tinkex.errors import InputError, RequestFailedError
from tinkex.server.store.records import AuditEntry, LoadOrder, Sampler, StoredCheckpoint
from tinkex.types import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    UnloadModelResponse,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clock import Clock
    from tinkex.engine.base import Engine, OptimResult, SampleResult, TrainResult
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import CheckpointKind, Model, Operation
    from tinkex.types import (
        ForwardBackwardInput,
        OptimStepRequest,
        SampleRequest,
        SaveWeightsExternalRequest,
        SaveWeightsForSamplerRequest,
        SaveWeightsRequest,
    )

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result and what it used."""

    value: object
    usage: Usage


def failure(message: str) -> RequestFailedError:
    """The caller's own mistake, found while running."""
    return RequestFailedError(message, None, "user")


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of one server; holds nothing of its own."""

    store: Store
    engine: Engine
    clock: Clock

    async def control(self, op: Operation) -> Done:
        """Run anything that is neither training nor sampling."""
        model = await self._model(op)
        check_request(op)
        match op.kind:
            case "create_model":
                await self.engine.create_adapter(_spec(model))
                value: object = CreateModelResponse(model_id=model.model_id)
            case "load_weights":
                value = await self._load(model, cast("LoadOrder", op.request))
            case "save_weights":
                value = await self._save_state(op, model)
            case "save_weights_for_sampler":
                value = await self._save_for_sampler(op, model)
            case "save_weights_external":
                value = await self._save_external(op, model)
            case "unload_model":
                await self.engine.drop_adapter(model.model_id)
                value = UnloadModelResponse(model_id=model.model_id, type="unload_model")
            case _:
                raise RequestFailedError(f"{op.kind} is no control operation", op.op_id, "server")
        return Done(value, Usage())

    async def train_op(self, op: Operation) -> TrainOp:
        """The engine's form of forward and forward_backward."""
        check_request(op)
        request = cast("ForwardBackwardInput", op.request)
        config = dict(request.loss_fn_config or {})
        loss = await self._custom_loss(op, config) if request.loss_fn == "custom" else None
        return TrainOp(
            op_id=op.op_id,
            model_id=cast("str", op.model_id),
            data=request.data,
            loss_fn=request.loss_fn,
            loss_fn_config=config,
            backward=op.kind == "forward_backward",
            custom_loss=loss,
        )

    async def optim_op(self, op: Operation) -> OptimOp:
        """The engine's form of optim_step."""
        check_request(op)
        request = cast("OptimStepRequest", op.request)
        return OptimOp(
            op_id=op.op_id, model_id=cast("str", op.model_id), params=request.optim_params
        )

    async def sample(self, op: Operation) -> Done:
        """Run one sampling request; cancelling frees its place in the engine."""
        request = cast("SampleRequest", op.request)
        sampler = await self.store.get_sampler(cast("str", op.sampler_id))
        if sampler is None:
            raise failure(f"there is no sampling session {op.sampler_id!r}")
        result = await self.engine.sample(
            SampleOp(
                op_id=op.op_id,
                weights=Weights(
                    base_model=sampler.base_model,
                    snapshot=sampler.snapshot,
                    location=sampler.location,
                ),
                prompt=request.prompt,
                params=request.sampling_params,
                sequence_ids=op.sequence_ids,
                prompt_logprobs=bool(request.prompt_logprobs),
                prompt_logprobs_last_n=request.prompt_logprobs_last_n,
                topk_prompt_logprobs=request.topk_prompt_logprobs,
                topk_sample_logprobs=request.topk_sample_logprobs,
                target_prompt_logprobs=request.target_prompt_logprobs,
                prompt_alt_tokens_k=request.prompt_alt_tokens_k,
                record_stability_info=bool(request.record_stability_info),
            )
        )
        return sampled(result)

    async def _model(self, op: Operation) -> Model:
        model = await self.store.get_model(op.model_id or "")
        if model is None:
            raise failure(f"there is no model {op.model_id!r}")
        return model

    async def _custom_loss(self, op: Operation, config: Mapping[str, float | str]) -> CustomLoss:
        loss_id = config.get("loss_id")
        loss = await self.store.get_loss(loss_id) if isinstance(loss_id, str) else None
        if loss is None or loss.owner != op.owner:
            raise failure(
                f"loss_fn_config names no uploaded loss (loss_id={loss_id!r}); "
                "create it in this session with create_custom_loss first"
            )
        return CustomLoss(inputs=loss.inputs, graph=loss.graph)

    async def _load(self, model: Model, order: LoadOrder) -> LoadWeightsResponse:
        checkpoint = await self._readable(order)
        if checkpoint.base_model != model.base_model:
            raise failure(
                f"{order.path} was trained on {checkpoint.base_model}, "
                f"this model is on {model.base_model}"
            )
        if order.creates_model:
            await self.engine.create_adapter(_spec(model))
        await self.engine.load_adapter(
            model.model_id, checkpoint.location, optimizer=order.optimizer
        )
        return LoadWeightsResponse(path=order.path, model_id=model.model_id, type="load_weights")

    async def _readable(self, order: LoadOrder) -> StoredCheckpoint:
        checkpoint = await self.store.get_checkpoint(order.path)
        now = self.clock.wall()
        if (
            checkpoint is None
            or not (checkpoint.public or checkpoint.owner in order.readers)
            or (checkpoint.expires_at is not None and checkpoint.expires_at <= now)
        ):
            raise failure(f"there is no checkpoint {order.path!r}")
        check_loadable(checkpoint, optimizer=order.optimizer)
        return checkpoint

    async def _save_state(self, op: Operation, model: Model) -> SaveWeightsResponse:
        request = cast("SaveWeightsRequest", op.request)
        name = request.path or f"{op.seq_id:06d}"
        saved = await self._save(
            op,
            model,
            "weights",
            name,
            request.ttl_seconds,
            metadata=request.user_metadata,
            overwrite=request.overwrite,
        )
        return SaveWeightsResponse(path=saved.path, type="save_weights")

    async def _save_for_sampler(
        self, op: Operation, model: Model
    ) -> SaveWeightsForSamplerResponseInternal:
        request = cast("SaveWeightsForSamplerRequest", op.request)
        if request.path is None and request.sampling_session_seq_id is not None:
            sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
            await self.engine.publish(model.model_id, sampler_id)
            await self.store.add_sampler(
                Sampler(
                    sampler_id=sampler_id,
                    owner=model.owner,
                    session_id=model.session_id,
                    base_model=model.base_model,
                    created_at=self.clock.wall(),
                    snapshot=sampler_id,
                )
            )
            return SaveWeightsForSamplerResponseInternal(
                sampling_session_id=sampler_id, type="save_weights_for_sampler"
            )
        name = request.path or f"{op.seq_id:06d}"
        saved = await self._save(
            op,
            model,
            "sampler_weights",
            name,
            request.ttl_seconds,
            metadata=request.user_metadata,
        )
        return SaveWeightsForSamplerResponseInternal(
            path=saved.path, type="save_weights_for_sampler"
        )

    async def _save_external(
        self, op: Operation, model: Model
    ) -> SaveWeightsExternalResponseInternal:
        request = cast("SaveWeightsExternalRequest", op.request)
        if request.age_encryption_recipients:
            raise failure("this server cannot encrypt exports; leave age_encryption_recipients out")
        saved = await self._save(op, model, "external_weights", request.path, request.ttl_seconds)
        return SaveWeightsExternalResponseInternal(
            path=saved.path, size_bytes=saved.size_bytes, type="save_weights_external"
        )

    async def _save(
        self,
        op: Operation,
        model: Model,
        kind: CheckpointKind,
        name: str,
        ttl_seconds: int | None,
        *,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> StoredCheckpoint:
        check_name(name)
        check_ttl(ttl_seconds)
        path = f"tinker://{model.model_id}/{kind}/{name}"
        old = await self.store.get_checkpoint(path)
        if old is not None and not overwrite:
            how = "pass overwrite=True or " if kind == "weights" else ""
            raise failure(f"{path} exists already; {how}choose another name")
        # The seq_id in the location keeps samplers of an overwritten name on what they had.
        location = f"{path}@{op.seq_id}"
        keep_optimizer = kind == "weights"
        saved = await self.engine.save_adapter(model.model_id, location, optimizer=keep_optimizer)
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
            has_optimizer=saved.has_optimizer,
            created_at=now,
            size_bytes=saved.size_bytes,
            user_metadata=dict(metadata) if metadata is not None else None,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            project_id=model.project_id,
        )
        await self.store.put_checkpoint(checkpoint)
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

    async def forget_location(self, location: str) -> None:
        """Delete saved weights, unless a sampler of a session that goes on was made for them."""
        for sampler in await self.store.samplers():
            session = await self.store.get_session(sampler.session_id)
            if sampler.location == location and session is not None and session.active:
                return
        await self.engine.delete_saved(location)


def trained(op: Operation, result: TrainResult) -> Done:
    """A training result in the server's form; a forward pass alone trains nothing."""
    if op.kind == "forward":
        return Done(result.output, Usage(prompt_tokens=result.tokens, device_s=result.device_s))
    return Done(result.output, Usage(trained_tokens=result.tokens, device_s=result.device_s))


def stepped(result: OptimResult) -> Done:
    """An optimizer step in the server's form."""
    return Done(OptimStepResponse(metrics=result.metrics), Usage(device_s=result.device_s))


def sampled(result: SampleResult) -> Done:
    """A sampling result in the server's form."""
    usage = Usage(
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        generated_tokens=result.generated_tokens,
        device_s=result.device_s,
    )
    return Done(result.response, usage)


def check_request(op: Operation) -> None:
    """Fail an operation whose request could not be understood when it arrived."""
    if isinstance(op.request, InputError):
        raise failure(str(op.request))


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


def check_loadable(checkpoint: StoredCheckpoint, *, optimizer: bool) -> None:
    """Refuse what cannot be trained from, naming the call that makes what can."""
    if checkpoint.kind == "external_weights":
        raise failure(f"{checkpoint.path} is an export; train from what save_state returned")
    if optimizer and not checkpoint.has_optimizer:
        raise failure(
            f"{checkpoint.path} has no optimizer state; load it without the optimizer, or save "
            "with save_state"
        )


def _spec(model: Model) -> AdapterSpec:
    return AdapterSpec(
        model_id=model.model_id,
        base_model=model.base_model,
        lora=model.lora,
        optimizer=model.optimizer,
    )
