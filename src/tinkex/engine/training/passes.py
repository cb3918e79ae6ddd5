"""One pass through the base model over slices of many operations, forward and backward.

Every operation's gradient has its own buffer, so it can be checked and discarded without affecting
the others.

Shapes: T tokens, D hidden, M targets, P all parameters of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType] -- torch's own stub

from tinkex.engine.backends.torch.linear import MIN_ROWS
from tinkex.engine.decoder import keep_activations
from tinkex.engine.lora import Segment, Targets, adapted_projections, sweep, wrap
from tinkex.engine.training.loss_evaluation import known_gradient, loss_gradient
from tinkex.engine.training.packing import positions
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.backends.cuda.strict_products import CudaProducts
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.lora import LoraWeights, Swept
    from tinkex.engine.training.examples import Ints, TrainingJob
    from tinkex.engine.training.packing import Slice
    from tinkex.types import LoraConfig


@dataclass(slots=True)
class TrainingWork:
    """One operation while its passes run; they fill in its results."""

    place: int
    job: TrainingJob
    lora: LoraConfig
    weights: Callable[[], LoraWeights]
    """Called in every pass, so that a long batch does not keep all adapters on the device."""
    logprobs: list[Tensor] = field(default_factory=list["Tensor"])
    """Per slice, on the CPU: the log-probability of every target."""
    gradient_P: Tensor | None = None
    error: RequestFailedError | None = None
    device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PassSlice:
    """One slice while its pass runs."""

    work: TrainingWork
    first: int
    last: int
    tokens: int
    weights: LoraWeights
    gradient: LoraWeights | None
    """Filled in by the backward pass; None when the operation has none."""
    targets: int

    @property
    def backward(self) -> bool:
        return self.gradient is not None


@dataclass(frozen=True, slots=True)
class PassContext:
    """The model and device of the passes, and the size of a chunk of logits."""

    decoder: Decoder
    device: torch.device
    logits_bytes: int
    strict_products: Callable[[Decoder, Sequence[Segment]], CudaProducts] | None = None
    """Makes the strict products of a pass, where plain ones differ from sampling."""


def run_pass(
    context: PassContext,
    works: Sequence[TrainingWork],
    slices: Sequence[Slice],
    *,
    recompute: bool = False,
) -> None:
    """Run some slices; log-probabilities and gradients are added to their operations.

    `recompute` is activation checkpointing of every block: less memory, one more forward pass, and
    the same bits. When it raises, nothing has been added.
    """
    parts = [_pass_slice(works[piece.op], piece) for piece in slices]
    computed = _compute(context, parts, recompute=recompute)
    for part, found in zip(parts, computed, strict=True):
        _record(part.work, found, None if part.gradient is None else part.gradient.flat_P)


def _pass_slice(work: TrainingWork, piece: Slice) -> PassSlice:
    targets = sum(example.targets.size for example in work.job.examples[piece.first : piece.last])
    weights = work.weights()
    gradient = None
    if work.job.op.backward:
        gradient = wrap(weights.config, weights.lora, torch.empty_like(weights.flat_P))
    return PassSlice(work, piece.first, piece.last, piece.tokens, weights, gradient, targets)


def _compute(context: PassContext, parts: Sequence[PassSlice], *, recompute: bool) -> list[Tensor]:
    """The log-probabilities of each part; its gradient is filled in."""
    backward = any(part.backward for part in parts)
    anchor = torch.zeros((), device=context.device, requires_grad=True) if backward else None
    # Copied before the device has work: a later copy would wait for all of that work.
    targets = _targets(parts, context.device)
    gradient_M = _known_gradients(parts) if backward else None
    if gradient_M is not None:
        gradient_M = gradient_M.to(context.device, _gradient_dtype(context))
    with torch.set_grad_enabled(backward):
        h_TD, segments, products = _hidden(context, parts, anchor, recompute=recompute)
    head = partial(_sweep, context, h_TD, segments, products, targets)
    counts = [part.targets for part in parts]
    swept = head(gradient_M)
    found_M = swept.logprobs_M
    if backward and gradient_M is None:
        found_M = found_M.cpu()
        gradient_M = _gradients(parts, found_M.split_with_sizes(counts))
        swept = head(gradient_M.to(context.device, _gradient_dtype(context)))
    if anchor is not None:
        _fill_gradients(h_TD, swept, anchor)
    # Read last: until here everything on a device is only queued.
    return list(found_M.cpu().split_with_sizes(counts))


def _hidden(
    context: PassContext, parts: Sequence[PassSlice], anchor: Tensor | None, *, recompute: bool
) -> tuple[Tensor, list[Segment], CudaProducts | None]:
    """Hidden states of all tokens, one segment per part, and the strict products, if any."""
    sequences: list[Ints] = []
    segments: list[Segment] = []
    start = stop = 0
    for part in parts:
        own = [example.tokens for example in part.work.job.examples[part.first : part.last]]
        sequences += own
        stop += sum(map(len, own))
        segments.append(Segment(start, stop, part.weights, part.gradient))
        start = stop
    if stop < MIN_ROWS:
        # Padding, as a sequence whose result is ignored: fewer rows would use other matrix kernels.
        sequences.append(np.zeros(MIN_ROWS - stop, np.int64))
    lengths = list(map(len, sequences))
    products = (
        None
        if context.strict_products is None
        else context.strict_products(context.decoder, segments)
    )
    h_TD = context.decoder.hidden(
        torch.from_numpy(np.concatenate(sequences)).to(context.device),  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        positions(lengths, context.device),
        context.decoder.backend.packed_attention(lengths, context.device),
        adapted_projections(
            context.decoder, segments, anchor=anchor, batch_invariant=True, products=products
        ),
        _checkpointed if recompute else keep_activations,
    )
    return h_TD, segments, products


def _checkpointed(block: Callable[[Tensor], Tensor], h_TD: Tensor) -> Tensor:
    """A `RunBlock` that recomputes the block in the backward pass."""
    run = cast("Any", checkpoint)  # it has no types
    # Blocks draw no random numbers, so there is no generator state to preserve.
    return run(block, h_TD, use_reentrant=False, preserve_rng_state=False)


def _targets(parts: Sequence[PassSlice], device: torch.device) -> Targets:
    examples = [
        example for part in parts for example in part.work.job.examples[part.first : part.last]
    ]
    ids = np.concatenate([example.targets.ravel() for example in examples])
    counts: list[int] = []
    for example in examples:
        counts += [example.targets_per_token] * len(example.tokens)
    return Targets(torch.from_numpy(ids).to(device), counts)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


def _sweep(
    context: PassContext,
    h_TD: Tensor,
    segments: list[Segment],
    products: CudaProducts | None,
    targets: Targets,
    gradient_M: Tensor | None,
) -> Swept:
    return sweep(
        *(h_TD, context.decoder, segments, targets, gradient_M),
        logits_bytes=context.logits_bytes,
        products=products,
    )


def _gradient_dtype(context: PassContext) -> torch.dtype:
    exact = context.decoder.unembed_VD.dtype == torch.float64
    return torch.float64 if exact else torch.float32


def _known_gradients(parts: Sequence[PassSlice]) -> Tensor | None:
    """The losses' gradients, if all of them are known before the log-probabilities."""
    found: list[Tensor] = []
    for part in parts:
        gradient_M = torch.zeros(part.targets, dtype=torch.float64)
        if part.backward:
            gradient_M = known_gradient(part.work.job, part.first, part.last)
        if gradient_M is None:
            return None
        found.append(gradient_M)
    return torch.cat(found)


def _gradients(parts: Sequence[PassSlice], logprobs: Sequence[Tensor]) -> Tensor:
    """The gradient of each part's loss by its log-probabilities.

    An operation whose loss cannot be computed fails here, and continues with zeros.
    """
    found: list[Tensor] = []
    for part, logprobs_M in zip(parts, logprobs, strict=True):
        gradient_M = torch.zeros(part.targets, dtype=torch.float64)
        if part.backward:
            try:
                gradient_M = loss_gradient(part.work.job, part.first, part.last, logprobs_M)
            except InputError as error:
                op_id = part.work.job.op.op_id
                part.work.error = RequestFailedError(str(error), op_id, "user")
        found.append(gradient_M)
    return torch.cat(found)


def _fill_gradients(h_TD: Tensor, swept: Swept, anchor: Tensor) -> None:
    """Run the backward pass, which writes the gradients of all parts that have one.

    The sweep has written those of the unembedding already.
    """
    if h_TD.requires_grad:  # False if all adapters cover only the unembedding
        torch.autograd.grad(h_TD, anchor, swept.dh_TD, allow_unused=True)


def _record(work: TrainingWork, logprobs: Tensor, gradient_P: Tensor | None) -> None:
    if work.error is not None:
        return
    if gradient_P is not None:
        # Cheaper than a check of every element: a sum is finite only if all its terms are.
        if not bool(gradient_P.sum().isfinite()):
            work.error = RequestFailedError(
                "loss: its gradient is not finite; check weights and advantages",
                work.job.op.op_id,
                "user",
            )
            return
        work.gradient_P = (
            gradient_P if work.gradient_P is None else work.gradient_P.add_(gradient_P)
        )
    work.logprobs.append(logprobs)
