"""One pass through the base model over slices of many operations, forward and backward.

Every operation's gradient is written to memory of its own, so it is known apart from all
others: it can be checked, and dropped, without disturbing them.

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
from tinkex.engine.decoder import plainly
from tinkex.engine.lora import Segment, Targets, adapted_projections, sweep, wrap
from tinkex.engine.training.packing import positions
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.backends.cuda.strict_products import CudaProducts
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.lora import LoraWeights, Swept
    from tinkex.engine.training.examples import Ints, Job
    from tinkex.engine.training.packing import Slice
    from tinkex.types import LoraConfig


@dataclass(slots=True)
class TrainingWork:
    """One operation on its way through the passes; the passes fill in what they find."""

    place: int
    job: Job
    lora: LoraConfig
    weights: Callable[[], LoraWeights]
    """Asked for in every pass, so that a long batch does not keep all adapters on the device."""
    logprobs: list[Tensor] = field(default_factory=list["Tensor"])
    """Per slice and on the CPU: the log-probability of every target."""
    gradient_P: Tensor | None = None
    error: RequestFailedError | None = None
    device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
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
class Room:
    """Where a pass runs, and how much of it a chunk of logits may take."""

    decoder: Decoder
    device: torch.device
    logits_bytes: int
    strict_products: Callable[[Decoder, Sequence[Segment]], CudaProducts] | None = None
    """What makes such products of a pass, where plain ones have other bits."""


def run_pass(
    room: Room, works: Sequence[TrainingWork], slices: Sequence[Slice], *, recompute: bool = False
) -> None:
    """Run some slices; log-probabilities and gradients are added to their operations.

    With `recompute` only the input of every block is kept for the backward pass: less memory,
    one more forward pass, and the same bits. When it raises, nothing has been added.
    """
    parts = [_part(works[piece.op], piece) for piece in slices]
    computed = _compute(room, parts, recompute=recompute)
    for part, found in zip(parts, computed, strict=True):
        _record(part.work, found, None if part.gradient is None else part.gradient.flat_P)


def _part(work: TrainingWork, piece: Slice) -> Part:
    targets = sum(example.targets.size for example in work.job.examples[piece.first : piece.last])
    weights = work.weights()
    gradient = None
    if work.job.op.backward:
        gradient = wrap(weights.config, weights.lora, torch.empty_like(weights.flat_P))
    return Part(work, piece.first, piece.last, piece.tokens, weights, gradient, targets)


def _compute(room: Room, parts: Sequence[Part], *, recompute: bool) -> list[Tensor]:
    """The log-probabilities of each part; its gradient is filled in."""
    backward = any(part.backward for part in parts)
    anchor = torch.zeros((), device=room.device, requires_grad=True) if backward else None
    # Sent to the device before it has work: later, this would wait for all of that.
    targets = _targets(parts, room.device)
    slope_M = _known_slopes(parts) if backward else None
    if slope_M is not None:
        slope_M = slope_M.to(room.device, _slope_dtype(room))
    with torch.set_grad_enabled(backward):
        h_TD, segments, products = _hidden(room, parts, anchor, recompute=recompute)
    head = partial(_sweep, room, h_TD, segments, products, targets)
    counts = [part.targets for part in parts]
    swept = head(slope_M)
    found_M = swept.logprobs_M
    if backward and slope_M is None:
        found_M = found_M.cpu()
        slope_M = _slopes(parts, found_M.split_with_sizes(counts))
        swept = head(slope_M.to(room.device, _slope_dtype(room)))
    if anchor is not None:
        _fill_gradients(h_TD, swept, anchor)
    # Read last: on a device everything above is only queued until here.
    return list(found_M.cpu().split_with_sizes(counts))


def _hidden(
    room: Room, parts: Sequence[Part], anchor: Tensor | None, *, recompute: bool
) -> tuple[Tensor, list[Segment], CudaProducts | None]:
    """Hidden states of all tokens, one segment per part, and how products are computed."""
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
        # A sequence that nobody reads keeps small batches on the usual matrix kernels.
        sequences.append(np.zeros(MIN_ROWS - stop, np.int64))
    lengths = list(map(len, sequences))
    products = (
        None if room.strict_products is None else room.strict_products(room.decoder, segments)
    )
    h_TD = room.decoder.hidden(
        torch.from_numpy(np.concatenate(sequences)).to(room.device),  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        positions(lengths, room.device),
        room.decoder.backend.packed_attention(lengths, room.device),
        adapted_projections(room.decoder, segments, anchor=anchor, packed=True, products=products),
        _again if recompute else plainly,
    )
    return h_TD, segments, products


def _again(block: Callable[[Tensor], Tensor], h_TD: Tensor) -> Tensor:
    """A `RunBlock` that computes the block again for the backward pass."""
    # Nothing in a block is random.
    again = cast("Any", checkpoint)  # it has no types
    return again(block, h_TD, use_reentrant=False, preserve_rng_state=False)


def _targets(parts: Sequence[Part], device: torch.device) -> Targets:
    examples = [
        example for part in parts for example in part.work.job.examples[part.first : part.last]
    ]
    ids = np.concatenate([example.targets.ravel() for example in examples])
    counts: list[int] = []
    for example in examples:
        counts += [example.targets_per_token] * len(example.tokens)
    return Targets(torch.from_numpy(ids).to(device), counts)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


def _sweep(
    room: Room,
    h_TD: Tensor,
    segments: list[Segment],
    products: CudaProducts | None,
    targets: Targets,
    slope_M: Tensor | None,
) -> Swept:
    return sweep(
        *(h_TD, room.decoder, segments, targets, slope_M),
        logits_bytes=room.logits_bytes,
        products=products,
    )


def _slope_dtype(room: Room) -> torch.dtype:
    exact = room.decoder.unembed_VD.dtype == torch.float64
    return torch.float64 if exact else torch.float32


def _known_slopes(parts: Sequence[Part]) -> Tensor | None:
    """The slopes, when every part's are known before its log-probabilities."""
    slopes: list[Tensor] = []
    for part in parts:
        loss = part.work.job.loss
        if not part.backward:
            slopes.append(torch.zeros(part.targets, dtype=torch.float64))
        elif loss is None or loss.slope is None:
            return None
        else:
            slopes.append(loss.slope(part.work.job.columns(part.first, part.last)))
    return torch.cat(slopes)


def _slopes(parts: Sequence[Part], logprobs: Sequence[Tensor]) -> Tensor:
    """The derivative of each part's loss by its log-probabilities.

    An operation whose loss cannot be computed fails here, and goes on with zeros.
    """
    slopes: list[Tensor] = []
    for part, found in zip(parts, logprobs, strict=True):
        slope_M = torch.zeros(part.targets, dtype=torch.float64)
        if part.backward:
            try:
                slope_M = _slope(part, found)
            except InputError as error:
                op_id = part.work.job.op.op_id
                part.work.error = RequestFailedError(str(error), op_id, "user")
        slopes.append(slope_M)
    return torch.cat(slopes)


def _slope(part: Part, found: Tensor) -> Tensor:
    job = part.work.job
    slope_M = (
        _custom_slope(part, found)
        if job.loss is None
        else _builtin_slope(job, part.first, part.last, found)
    )
    if not bool(slope_M.isfinite().all()):
        raise InputError(
            f"its gradient is not finite for data[{part.first}:{part.last}]: the ratio of new to "
            "old probabilities may be too large; check logprobs",
            "loss",
        )
    return slope_M


def _builtin_slope(job: Job, first: int, last: int, found: Tensor) -> Tensor:
    loss = job.loss
    assert loss is not None
    p = found.double().requires_grad_()
    total = loss.function(p, job.columns(first, last), job.settings).elements.sum()
    return torch.autograd.grad(total, p)[0]


def _custom_slope(part: Part, found: Tensor) -> Tensor:
    job = part.work.job
    assert job.custom is not None
    examples = job.examples[part.first : part.last]
    slopes: list[Tensor] = []
    start = 0
    for example in examples:
        p = found[start : start + example.targets.size].view(example.shape)
        p = p.clone().requires_grad_()
        start += example.targets.size
        value, _ = job.custom.evaluate(p, dict(example.values))
        slopes.append(_derivative(value, p).flatten())
    return torch.cat(slopes).double()


def _derivative(value: Tensor, p: Tensor) -> Tensor:
    if not value.requires_grad:  # a loss that does not depend on the log-probabilities
        return torch.zeros_like(p)
    try:
        (slope,) = torch.autograd.grad(value, p, allow_unused=True)
    except RuntimeError as error:
        raise InputError(f"has no gradient: {error}", "graph") from error
    return torch.zeros_like(p) if slope is None else slope  # pyright: ignore[reportUnnecessaryComparison] -- allow_unused


def _fill_gradients(h_TD: Tensor, swept: Swept, anchor: Tensor) -> None:
    """Run the backward pass, which writes the gradients of all parts that want one.

    Those of the unembedding are there already: the sweep wrote them.
    """
    if h_TD.requires_grad:  # not if all adapters cover the unembedding alone
        torch.autograd.grad(h_TD, anchor, swept.dh_TD, allow_unused=True)


def _record(work: TrainingWork, logprobs: Tensor, gradient_P: Tensor | None) -> None:
    if work.error is not None:
        return
    if gradient_P is not None:
        # A sum is finite only if all its terms are, and much cheaper to ask.
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
