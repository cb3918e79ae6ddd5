"""Trains any number of LoRA adapters on one base model, many operations in one pass.

The trainer owns the adapters' weights, optimizer state and accumulated gradients. It is
synchronous: the caller decides when and on which thread it runs.

A batch is checked first; then its sequences share passes through the base weights; then
each operation's gradient is added to its adapter. An operation that fails at any of these
leaves its adapter, and every other operation, exactly as they were.

Shapes: T tokens of a pass, D hidden, M targets, P all parameters of an adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from tinkex.clock import SystemClock
from tinkex.engine.backends.torch.adamw import Moments, fresh_moments
from tinkex.engine.checkpoints import adapter_file
from tinkex.engine.checkpoints.parking import Packed, Parking
from tinkex.engine.failures import failure, user_error
from tinkex.engine.lora import LOGITS_BYTES, check_lora, initial, seed_of, wrap
from tinkex.engine.protocol import OptimResult, TrainResult
from tinkex.engine.training.batch import TrainingBatch
from tinkex.engine.training.examples import check_op
from tinkex.engine.training.loss_evaluation import train_output
from tinkex.engine.training.memory import PassMemory, check_adapter
from tinkex.engine.training.optim import (
    adamw_step,
    check_optimizer,
    check_params,
)
from tinkex.engine.training.passes import PassContext, TrainingWork
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import Tensor

    from tinkex.clock import Clock
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.protocol import AdapterSpec, OptimOp, TrainOp
    from tinkex.types import LoraConfig, OptimizerConfig

MAX_PASS_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAdapter:
    """An adapter with its training state; replaced as a whole, its tensors are never modified."""

    weights: LoraWeights
    optimizer: OptimizerConfig
    moments: Moments
    gradient_P: Tensor | None = None


class Trainer:
    """The adapters of one base model.

    `dtype` is the precision of activations and must be that of the decoder's weights;
    adapters, gradients and optimizer state are fp32. A pass takes at most `memory_bytes`;
    None means that there is always enough.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_pass_tokens: int = MAX_PASS_TOKENS,
        logits_bytes: int = LOGITS_BYTES,
        strict: bool = False,
        memory_bytes: int | None = None,
        parking: Parking | None = None,
        clock: Clock | None = None,
    ) -> None:
        if decoder.unembed_VD.dtype != dtype:
            raise InputError(
                f"is {dtype}, but the model was loaded as {decoder.unembed_VD.dtype}", "dtype"
            )
        products = decoder.backend.strict_products if strict else None
        self._context = PassContext(
            decoder, torch.device(device), logits_bytes, None if products is None else products()
        )
        self._config = decoder.config
        self._device = torch.device(device)
        self._max_pass_tokens = max_pass_tokens
        self._clock = clock or SystemClock()
        self._memory = PassMemory(
            config=decoder.config,
            itemsize=dtype.itemsize,
            logits_bytes=logits_bytes,
            limit_bytes=memory_bytes,
        )
        self._parking = parking or Parking(device)
        # Mutable state: the adapters, each replaced when it changes, and their LoRA configurations,
        # which are needed while they are parked.
        self._adapters = self._parking.shelf(f"training/{decoder.config.name}", _pack)
        self._loras: dict[str, LoraConfig] = {}

    @property
    def adapters(self) -> Mapping[str, TrainedAdapter]:
        """The adapters by model id."""
        return self._adapters

    def create(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter; an id that exists is refused."""
        if spec.model_id in self._adapters:
            raise user_error(f"model {spec.model_id!r} exists already")
        try:
            check_lora(spec.lora)
            check_optimizer(spec.optimizer)
            check_adapter(self._config, spec.lora, self._parking.device_bytes)
        except InputError as error:
            raise user_error(str(error)) from error
        seed = seed_of(spec.lora, spec.model_id)
        # The seed is stored, so that a checkpoint records its adapter's initial weights.
        lora = spec.lora.model_copy(update={"seed": seed})
        weights = initial(self._config, lora, seed, self._device)
        self._adapters[spec.model_id] = TrainedAdapter(
            weights=weights, optimizer=spec.optimizer, moments=fresh_moments(weights.flat_P)
        )
        self._loras[spec.model_id] = lora

    def drop(self, model_id: str) -> None:
        """Drop an adapter; unknown ids are ignored."""
        if self._loras.pop(model_id, None) is not None:
            del self._adapters[model_id]

    def weights(self, model_id: str) -> LoraWeights:
        """The adapter's current weights; training replaces them and never modifies them."""
        return self._adapter(model_id).weights

    def train(self, batch: Sequence[TrainOp]) -> list[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations; answers come in their order."""
        passes = self.passes(batch)
        while True:
            try:
                next(passes)
            except StopIteration as end:
                return end.value

    def passes(
        self, batch: Sequence[TrainOp], most_tokens: Callable[[], int] | None = None
    ) -> Generator[None, None, list[TrainResult | RequestFailedError]]:
        """The same as a generator that yields between passes.

        The adapters of the batch must not change meanwhile. `most_tokens` bounds the next pass,
        which has at least one slice. Closed early, it leaves each operation either done or
        untouched.
        """
        answers: list[TrainResult | RequestFailedError | None] = [None] * len(batch)
        works: list[TrainingWork] = []
        for place, op in enumerate(batch):
            try:
                works.append(self._work(place, op))
            except RequestFailedError as error:
                answers[place] = error
        run = TrainingBatch(
            self._context,
            self._memory,
            works,
            max_pass_tokens=self._max_pass_tokens,
            fits_adapters=self._fit,
            clock=self._clock,
        )
        while not run.done:
            bound = self._max_pass_tokens if most_tokens is None else most_tokens()
            bound = min(bound, self._max_pass_tokens)
            with self._parking.holding():
                for work in run.step(bound):
                    answers[work.place] = self._finish(work)
            if not run.done:
                yield
        return [answer for answer in answers if answer is not None]

    def optim_step(self, batch: Sequence[OptimOp]) -> list[OptimResult | RequestFailedError]:
        """Apply and clear the accumulated gradient of each operation's adapter.

        Without a gradient the step runs with zeros: momentum and weight decay still act.
        """
        return [self._step(op) for op in batch]

    def state(self, model_id: str, *, optimizer: bool) -> adapter_file.State:
        """A copy of an adapter in host memory, so that training continues while it is written."""
        adapter = self._adapter(model_id)
        weights, moments = adapter.weights, adapter.moments
        gradient_P = adapter.gradient_P
        return adapter_file.State(
            base_model=self._config.name,
            weights=wrap(self._config, weights.lora, weights.flat_P.cpu()),
            optimizer=adapter.optimizer,
            moments=_moved(moments, "cpu") if optimizer else None,
            gradient_P=None if gradient_P is None or not optimizer else gradient_P.cpu(),
        )

    def restore(self, model_id: str, state: adapter_file.State, *, optimizer: bool) -> None:
        """Replace an adapter's weights and, when asked, its optimizer state and gradient.

        Without the optimizer state training restarts from these weights.
        """
        adapter = self._adapter(model_id)
        lora, wanted = state.weights.lora, adapter.weights.lora
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(lora, name) != getattr(wanted, name):
                raise user_error(
                    f"the checkpoint has {name}={getattr(lora, name)}, "
                    f"the model {name}={getattr(wanted, name)}"
                )
        if optimizer and state.moments is None:
            raise user_error("the checkpoint has no optimizer state; load its weights alone")
        self._adapters[model_id] = self._restored(adapter, state, optimizer=optimizer)
        self._loras[model_id] = lora

    def _restored(
        self, adapter: TrainedAdapter, state: adapter_file.State, *, optimizer: bool
    ) -> TrainedAdapter:
        flat_P = state.weights.flat_P.to(self._device)
        weights = wrap(self._config, state.weights.lora, flat_P)
        if not optimizer or state.moments is None:
            return TrainedAdapter(
                weights=weights, optimizer=adapter.optimizer, moments=fresh_moments(flat_P)
            )
        moments = _moved(state.moments, self._device)
        gradient_P = None if state.gradient_P is None else state.gradient_P.to(self._device)
        return TrainedAdapter(
            weights=weights,
            optimizer=state.optimizer or adapter.optimizer,
            moments=moments,
            gradient_P=gradient_P,
        )

    def _work(self, place: int, op: TrainOp) -> TrainingWork:
        lora = self._loras.get(op.model_id)
        if lora is None:
            raise user_error(_not_loaded(op.model_id), op.op_id)
        try:
            job = check_op(op, self._config, partial(self._most_targets, lora, op.backward))
        except InputError as error:
            raise user_error(str(error), op.op_id) from error
        return TrainingWork(place, job, lora, lambda: self._adapters[op.model_id].weights)

    def _most_targets(self, lora: LoraConfig, backward: bool, lengths: Sequence[int]) -> int | None:
        """How many targets fit with the longest sequence; refuses a sequence that is too long."""
        most = self._memory.most_tokens(lora, backward=backward)
        for number, length in enumerate(lengths):
            if most is not None and length > most:
                raise InputError(
                    f"has {length} tokens; a training pass of rank {lora.rank} has memory for "
                    f"{most}",
                    f"data[{number}].model_input",
                )
        return self._memory.most_targets(lora, max(lengths), backward=backward)

    def _fit(self, model_ids: set[str]) -> bool:
        """Whether these adapters can be on the device at the same time."""
        room = self._parking.device_bytes
        return room is None or sum(map(self._adapters.size_of, model_ids)) <= room

    def _finish(self, work: TrainingWork) -> TrainResult | RequestFailedError:
        op_id = work.job.op.op_id
        if work.error is not None:
            return work.error
        try:
            output = train_output(work.job, work.logprobs)
            self._accumulate(work)
        except Exception as error:  # noqa: BLE001 - whatever it is ends in the operation's error
            return failure(error, "while accumulating the gradient", op_id)
        tokens = sum(work.job.lengths)
        return TrainResult(output=output, tokens=tokens, device_s=work.device_s)

    def _accumulate(self, work: TrainingWork) -> None:
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
            metrics = self._stepped(op)
        except Exception as error:  # noqa: BLE001 - whatever it is ends in the operation's error
            return failure(error, "in an optimizer step", op.op_id)
        return OptimResult(metrics=metrics, device_s=self._clock.now() - before)

    def _stepped(self, op: OptimOp) -> dict[str, float]:
        adapter = self._adapter(op.model_id)
        params = check_params(op.params)
        weights, gradient_P = adapter.weights, adapter.gradient_P
        if gradient_P is None:
            gradient_P = torch.zeros_like(weights.flat_P)
        flat_P, moments, metrics = adamw_step(
            weights.flat_P, gradient_P, adapter.moments, params, self._context.decoder.backend
        )
        if not all(math.isfinite(value) for value in metrics.values()):
            raise user_error("the step would make weights that are not finite")
        self._adapters[op.model_id] = TrainedAdapter(
            weights=wrap(self._config, weights.lora, flat_P),
            optimizer=adapter.optimizer,
            moments=moments,
        )
        return metrics

    def _adapter(self, model_id: str) -> TrainedAdapter:
        if model_id not in self._adapters:
            raise user_error(_not_loaded(model_id))
        return self._adapters[model_id]


def _not_loaded(model_id: str) -> str:
    return f"model {model_id!r} is not loaded"


def _moved(moments: Moments, device: torch.device | str) -> Moments:
    return Moments(moments.first_P.to(device), moments.second_P.to(device), moments.step)


def _pack(adapter: TrainedAdapter) -> Packed[TrainedAdapter]:
    weights, moments, optimizer = adapter.weights, adapter.moments, adapter.optimizer
    config, lora, step = weights.config, weights.lora, moments.step
    tensors = {
        "weights": weights.flat_P,
        "first": moments.first_P,
        "second": moments.second_P,
    }
    if adapter.gradient_P is not None:
        tensors["gradient"] = adapter.gradient_P

    def rebuild(found: dict[str, Tensor]) -> TrainedAdapter:
        return TrainedAdapter(
            weights=wrap(config, lora, found["weights"]),
            optimizer=optimizer,
            moments=Moments(found["first"], found["second"], step),
            gradient_P=found.get("gradient"),
        )

    return Packed(tensors, rebuild)
