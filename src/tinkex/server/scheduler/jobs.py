"""Operations in the engine's form, and the engine's results in the server's.

A job returns the protocol's own result and what it used, or raises `RequestFailedError`
or `InputError`. When jobs run is the worker's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import anyio.to_thread

from tinkex.engine.protocol import (
    AdapterSpec,
    CustomLoss,
    EncodedTrainOp,
    OptimOp,
    SampleOp,
    TrainOp,
)
from tinkex.errors import InputError, RequestFailedError
from tinkex.server.scheduler.checkpoints import failure
from tinkex.types import OptimStepResponse, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinkex.engine.protocol import OptimResult, SampleResult, TrainResult, Weights
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import EncodedBatch, Model, Operation
    from tinkex.types import OptimStepRequest, SampleRequest


# Decoding more than this on the loop would delay other requests noticeably.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result and what it used."""

    value: object
    usage: Usage


@dataclass(frozen=True, slots=True)
class Jobs:
    """Reads requests; `decode` makes those again that a restart has lost.

    `takes_bodies` says whether the engine decodes the bodies of training operations itself.
    """

    store: Store
    decode: Callable[[Operation], object]
    takes_bodies: bool = False

    def request(self, op: Operation) -> object:
        """What an operation asks for; one that could not be understood fails here."""
        request = op.request if op.request is not None else self.decode(op)
        if isinstance(request, InputError):
            raise failure(str(request))
        return request

    async def train_op(self, op: Operation) -> TrainOp:
        """The engine's form of forward and forward_backward."""
        batch = cast("EncodedBatch", self.request(op))
        config = batch.custom_loss
        loss = None if config is None else await self._custom_loss(op, config)
        if self.takes_bodies:
            encoded = EncodedTrainOp(
                op_id=op.op_id,
                model_id=cast("str", op.model_id),
                body=op.body,
                media=op.media,
                backward=op.kind == "forward_backward",
                custom_loss=loss,
            )
            return cast("TrainOp", encoded)  # which such an engine takes in its place
        if len(op.body) > _LARGE_BYTES:
            request = await anyio.to_thread.run_sync(batch.decode)
        else:
            request = batch.decode()
        return TrainOp(
            op_id=op.op_id,
            model_id=cast("str", op.model_id),
            data=request.data,
            loss_fn=request.loss_fn,
            loss_fn_config=dict(request.loss_fn_config or {}),
            backward=op.kind == "forward_backward",
            custom_loss=loss,
        )

    def optim_op(self, op: Operation) -> OptimOp:
        """The engine's form of optim_step."""
        request = cast("OptimStepRequest", self.request(op))
        return OptimOp(
            op_id=op.op_id, model_id=cast("str", op.model_id), params=request.optim_params
        )

    def sample_op(self, op: Operation, weights: Weights) -> SampleOp:
        """The engine's form of a sample."""
        request = cast("SampleRequest", self.request(op))
        return SampleOp(
            op_id=op.op_id,
            weights=weights,
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
            cache_salt=op.owner,
        )

    async def _custom_loss(self, op: Operation, config: Mapping[str, float | str]) -> CustomLoss:
        loss_id = config.get("loss_id")
        loss = await self.store.get_loss(loss_id) if isinstance(loss_id, str) else None
        if loss is None or loss.owner != op.owner:
            raise failure(
                f"loss_fn_config names no uploaded loss (loss_id={loss_id!r}); "
                "create it in this session with create_custom_loss first"
            )
        return CustomLoss(inputs=loss.inputs, graph=loss.graph)


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


def spec_of(model: Model) -> AdapterSpec:
    """What the engine must know to make a model."""
    return AdapterSpec(
        model_id=model.model_id,
        base_model=model.base_model,
        lora=model.lora,
        optimizer=model.optimizer,
    )


def died_under(op: Operation) -> RequestFailedError:
    """What is said of an operation that is not tried again."""
    return RequestFailedError(
        "the engine died each time this operation ran, so it is not tried again; it may need more "
        "memory than there is",
        op.op_id,
        "server",
    )


def check_created(model: Model, done: Sequence[Operation]) -> None:
    """Raise if a model cannot be restored because its creation failed, or never ran."""
    first = done[0] if done and done[0].seq_id == 0 else None
    if first is not None and first.outcome is not None and first.outcome.error is not None:
        raise RequestFailedError(
            f"the model was not created: {first.outcome.error}", None, first.outcome.category
        )
    if first is None and model.snapshot_location is None:
        raise RequestFailedError(f"model {model.model_id!r} has not been created", None, "user")


def check_same(
    operations: Sequence[Operation],
    answers: Sequence[TrainResult | RequestFailedError]
    | Sequence[OptimResult | RequestFailedError],
) -> None:
    """Raise if an operation that succeeded once fails when it is replayed."""
    for op, answer in zip(operations, cast("Sequence[object]", answers), strict=True):
        if isinstance(answer, RequestFailedError):
            raise RequestFailedError(
                f"model {op.model_id!r} cannot be restored: request {op.seq_id} succeeded once and "
                f"now fails with: {answer.message}",
                None,
                "server",
            )
