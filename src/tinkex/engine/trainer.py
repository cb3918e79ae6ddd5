"""Trains any number of LoRA adapters on one base model, many operations in one pass.

The trainer owns the adapters' weights, optimizer state and accumulated gradients. It is
plain and synchronous: whoever calls it decides when and on which thread.

A batch is checked first; then its sequences share passes through the base weights; then
each operation's gradient is added to its adapter. An operation that fails at any of these
leaves its adapter, and every other operation, exactly as they were.

Shapes: T tokens of a pass, D hidden, M targets, P all parameters of an adapter.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from tinkex.clock import SystemClock
from tinkex.engine import checkpoints
from tinkex.engine.base import OptimResult, TrainResult
from tinkex.engine.examples import check_op
from tinkex.engine.lora import LOGITS_BYTES, check_lora, initial, seed_of, wrap
from tinkex.engine.optim import (
    Moments,
    adamw_step,
    check_optimizer,
    check_params,
    fresh_moments,
)
from tinkex.engine.packing import plan_passes
from tinkex.engine.passes import Room, Work, run_pass
from tinkex.engine.results import train_output
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from tinkex.clock import Clock
    from tinkex.engine.base import AdapterSpec, OptimOp, SavedAdapter, TrainOp
    from tinkex.engine.examples import Job
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import Decoder
    from tinkex.engine.packing import Slice
    from tinkex.types import OptimizerConfig

logger = logging.getLogger(__name__)

MAX_PASS_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Everything an adapter is; replaced as a whole, its tensors never change in place."""

    weights: LoraWeights
    optimizer: OptimizerConfig
    moments: Moments
    gradient_P: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An adapter as it was after `step` optimizer steps; training never touches it."""

    model_id: str
    step: int
    weights: LoraWeights


class Trainer:
    """The adapters of one base model.

    `dtype` is the precision of activations and must be that of the decoder's weights;
    adapters, gradients and optimizer state are fp32.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_pass_tokens: int = MAX_PASS_TOKENS,
        logits_bytes: int = LOGITS_BYTES,
        clock: Clock | None = None,
    ) -> None:
        if decoder.unembed_VD.dtype != dtype:
            raise InputError(
                f"is {dtype}, but the model was loaded as {decoder.unembed_VD.dtype}", "dtype"
            )
        self._room = Room(decoder, torch.device(device), logits_bytes)
        self._config = decoder.config
        self._device = torch.device(device)
        self._max_pass_tokens = max_pass_tokens
        self._clock = clock or SystemClock()
        # Mutable state: the adapters, each replaced when it changes.
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by model id."""
        return self._adapters

    def create(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter; an id that exists is refused."""
        if spec.model_id in self._adapters:
            raise _user(f"model {spec.model_id!r} exists already")
        try:
            check_lora(spec.lora)
            check_optimizer(spec.optimizer)
        except InputError as error:
            raise _user(str(error)) from error
        seed = seed_of(spec.lora, spec.model_id)
        # The seed is kept, so that a checkpoint says how its adapter began.
        lora = spec.lora.model_copy(update={"seed": seed})
        weights = initial(self._config, lora, seed, self._device)
        self._adapters[spec.model_id] = Adapter(
            weights=weights, optimizer=spec.optimizer, moments=fresh_moments(weights.flat_P)
        )

    def drop(self, model_id: str) -> None:
        """Forget an adapter; unknown ids are fine."""
        self._adapters.pop(model_id, None)

    def snapshot(self, model_id: str) -> Snapshot:
        """The adapter's weights as they are now, for sampling."""
        adapter = self._adapter(model_id)
        # Adapters are replaced, never written to, so the snapshot can share their memory.
        return Snapshot(model_id=model_id, step=adapter.moments.step, weights=adapter.weights)

    def train(self, batch: Sequence[TrainOp]) -> list[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations; answers come in their order."""
        answers: list[TrainResult | RequestFailedError | None] = [None] * len(batch)
        works: list[Work] = []
        for place, op in enumerate(batch):
            try:
                works.append(self._work(place, op))
            except RequestFailedError as error:
                answers[place] = error
        self._run(works)
        for work in works:
            answers[work.place] = self._finish(work)
        return [answer for answer in answers if answer is not None]

    def optim_step(self, batch: Sequence[OptimOp]) -> list[OptimResult | RequestFailedError]:
        """Apply and clear the accumulated gradient of each operation's adapter.

        Without a gradient the step runs with zeros: momentum and weight decay still act.
        """
        return [self._step(op) for op in batch]

    def save(self, model_id: str, path: Path, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter to a file; complete and durable when it returns."""
        adapter = self._adapter(model_id)
        state = checkpoints.State(
            base_model=self._config.name,
            weights=adapter.weights,
            optimizer=adapter.optimizer,
            moments=adapter.moments if optimizer else None,
            gradient_P=adapter.gradient_P if optimizer else None,
        )
        return checkpoints.save(state, path)

    def load(self, model_id: str, path: Path, *, optimizer: bool) -> None:
        """Replace an adapter's weights and, when asked, its optimizer state and gradient.

        Without the optimizer state training starts afresh from these weights.
        """
        adapter = self._adapter(model_id)
        state = checkpoints.load(path, self._config)
        lora, wanted = state.weights.lora, adapter.weights.lora
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(lora, name) != getattr(wanted, name):
                raise _user(
                    f"the checkpoint has {name}={getattr(lora, name)}, "
                    f"the model {name}={getattr(wanted, name)}"
                )
        if optimizer and state.moments is None:
            raise _user("the checkpoint has no optimizer state; load its weights alone")
        self._adapters[model_id] = self._restored(adapter, state, optimizer=optimizer)

    def _restored(self, adapter: Adapter, state: checkpoints.State, *, optimizer: bool) -> Adapter:
        flat_P = state.weights.flat_P.to(self._device)
        weights = wrap(self._config, state.weights.lora, flat_P)
        if not optimizer or state.moments is None:
            return Adapter(
                weights=weights, optimizer=adapter.optimizer, moments=fresh_moments(flat_P)
            )
        moments = Moments(
            state.moments.first_P.to(self._device),
            state.moments.second_P.to(self._device),
            state.moments.step,
        )
        gradient_P = None if state.gradient_P is None else state.gradient_P.to(self._device)
        return Adapter(
            weights=weights, optimizer=state.optimizer, moments=moments, gradient_P=gradient_P
        )

    def _work(self, place: int, op: TrainOp) -> Work:
        adapter = self._adapter(op.model_id, op.op_id)
        try:
            job = check_op(op, self._config)
        except InputError as error:
            raise _user(str(error), op.op_id) from error
        return Work(place, job, adapter.weights)

    def _run(self, works: list[Work]) -> None:
        lengths = [work.job.lengths for work in works]
        for planned in plan_passes(lengths, self._max_pass_tokens):
            slices = [piece for piece in planned if works[piece.op].error is None]
            if not slices:
                continue
            before = self._clock.now()
            try:
                run_pass(self._room, works, slices)
            except (RuntimeError, MemoryError) as error:
                self._run_alone(works, slices, error)
            spent, tokens = self._clock.now() - before, sum(piece.tokens for piece in slices)
            for piece in slices:
                works[piece.op].device_s += spent * piece.tokens / tokens

    def _run_alone(self, works: list[Work], slices: list[Slice], error: BaseException) -> None:
        """After a pass that failed: each operation by itself, so that only the culprit fails."""
        for piece in slices:
            work = works[piece.op]
            if len(slices) > 1:
                try:
                    run_pass(self._room, works, [piece])
                    continue
                except (RuntimeError, MemoryError) as own:
                    error = own
            logger.warning("operation %s failed on the device", work.job.op.op_id, exc_info=error)
            work.error = _failed(error, work.job)

    def _finish(self, work: Work) -> TrainResult | RequestFailedError:
        op = work.job.op
        if work.error is None:
            try:
                output = train_output(work)
            except InputError as error:
                work.error = _user(str(error), op.op_id)
            else:
                self._accumulate(work)
                tokens = sum(work.job.lengths)
                return TrainResult(output=output, tokens=tokens, device_s=work.device_s)
        return work.error

    def _accumulate(self, work: Work) -> None:
        if work.gradient_P is None:
            return
        adapter = self._adapters[work.job.op.model_id]
        total_P = work.gradient_P
        if adapter.gradient_P is not None:
            total_P = adapter.gradient_P + total_P
        self._adapters[work.job.op.model_id] = replace(adapter, gradient_P=total_P)

    def _step(self, op: OptimOp) -> OptimResult | RequestFailedError:
        before = self._clock.now()
        try:
            adapter = self._adapter(op.model_id, op.op_id)
            params = check_params(op.params)
        except RequestFailedError as error:
            return error
        except InputError as error:
            return _user(str(error), op.op_id)
        weights, gradient_P = adapter.weights, adapter.gradient_P
        if gradient_P is None:
            gradient_P = torch.zeros_like(weights.flat_P)
        flat_P, moments, metrics = adamw_step(weights.flat_P, gradient_P, adapter.moments, params)
        if not all(math.isfinite(value) for value in metrics.values()):
            return _user("the step would make weights that are not finite", op.op_id)
        self._adapters[op.model_id] = Adapter(
            weights=wrap(self._config, weights.lora, flat_P),
            optimizer=adapter.optimizer,
            moments=moments,
        )
        return OptimResult(metrics=metrics, device_s=self._clock.now() - before)

    def _adapter(self, model_id: str, op_id: str | None = None) -> Adapter:
        adapter = self._adapters.get(model_id)
        if adapter is None:
            raise _user(f"model {model_id!r} is not loaded", op_id)
        return adapter


def _user(message: str, request_id: str | None = None) -> RequestFailedError:
    return RequestFailedError(message, request_id, "user")


def _failed(error: BaseException, job: Job) -> RequestFailedError:
    tokens = max(job.lengths)
    reason = "ran out of memory" if _is_memory(error) else "failed"
    failure = RequestFailedError(
        f"the device {reason} on a sequence of {tokens} tokens: {error}", job.op.op_id, "server"
    )
    failure.__cause__ = error
    return failure


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
