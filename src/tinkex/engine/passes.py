"""One pass through the base model over slices of many operations, forward and backward.

Every operation has autograd leaves of its own, so its gradient is known apart from all
others: it can be checked, and dropped, without disturbing them.

Shapes: T tokens, D hidden, M targets, P all parameters of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.lora import Segment, Targets, adapted_projections, sweep, wrap
from tinkex.engine.packing import MIN_ROWS, PackedAttention, positions
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.examples import Job
    from tinkex.engine.lora import LoraWeights, Swept
    from tinkex.engine.models.base import Decoder
    from tinkex.engine.packing import Slice


@dataclass(slots=True)
class Work:
    """One operation on its way through the passes; the passes fill in what they find."""

    place: int
    job: Job
    weights: LoraWeights
    logprobs: list[Tensor] = field(default_factory=list["Tensor"])
    """Per slice and on the CPU: the log-probability of every target."""
    gradient_P: Tensor | None = None
    error: RequestFailedError | None = None
    device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """One slice while its pass runs."""

    work: Work
    first: int
    last: int
    leaves: LoraWeights
    targets: int

    @property
    def backward(self) -> bool:
        return self.work.job.op.backward


@dataclass(frozen=True, slots=True)
class Room:
    """Where a pass runs, and how much of it a chunk of logits may take."""

    decoder: Decoder
    device: torch.device
    logits_bytes: int


def run_pass(room: Room, works: Sequence[Work], slices: Sequence[Slice]) -> None:
    """Run some slices; log-probabilities and gradients are added to their operations.

    When it raises, nothing has been added.
    """
    parts = [_part(works[piece.op], piece) for piece in slices]
    backward = any(part.backward for part in parts)
    with torch.set_grad_enabled(backward):
        h_TD, segments = _hidden(room, parts)
    targets = _targets(parts, room.device)
    slope_M = _known_slopes(parts) if backward else None
    swept = _sweep(room, h_TD, segments, targets, slope_M)
    logprobs = torch.split(swept.logprobs_M.cpu(), [part.targets for part in parts])
    if backward and slope_M is None:
        slope_M = _slopes(parts, logprobs)
        swept = _sweep(room, h_TD, segments, targets, slope_M)
    gradients = _gradients(parts, h_TD, swept) if backward else [None] * len(parts)
    for part, found, gradient_P in zip(parts, logprobs, gradients, strict=True):
        _record(part.work, found, gradient_P)


def _part(work: Work, piece: Slice) -> _Part:
    targets = sum(example.targets.size for example in work.job.examples[piece.first : piece.last])
    leaves = work.weights.leaves() if work.job.op.backward else work.weights
    return _Part(work, piece.first, piece.last, leaves, targets)


def _hidden(room: Room, parts: list[_Part]) -> tuple[Tensor, list[Segment]]:
    """Hidden states of all tokens, one segment per part."""
    tokens: list[int] = []
    lengths: list[int] = []
    segments: list[Segment] = []
    for part in parts:
        start = len(tokens)
        for example in part.work.job.examples[part.first : part.last]:
            tokens += example.tokens
            lengths.append(len(example.tokens))
        segments.append(Segment(start, len(tokens), part.leaves))
    if len(tokens) < MIN_ROWS:
        # A sequence that nobody reads keeps small batches on the usual matrix kernels.
        lengths.append(MIN_ROWS - len(tokens))
        tokens += [0] * lengths[-1]
    h_TD = room.decoder.hidden(
        torch.tensor(tokens, device=room.device),
        positions(lengths, room.device),
        PackedAttention(lengths),
        adapted_projections(room.decoder, segments),
    )
    return h_TD, segments


def _targets(parts: list[_Part], device: torch.device) -> Targets:
    examples = [
        example for part in parts for example in part.work.job.examples[part.first : part.last]
    ]
    ids = np.concatenate([example.targets.ravel() for example in examples])
    counts = [example.targets_per_token for example in examples for _ in range(len(example.tokens))]
    return Targets(torch.from_numpy(ids).to(device), counts)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


def _sweep(
    room: Room,
    h_TD: Tensor,
    segments: list[Segment],
    targets: Targets,
    slope_M: Tensor | None,
) -> Swept:
    if slope_M is not None:
        kind = torch.float64 if h_TD.dtype == torch.float64 else torch.float32
        slope_M = slope_M.to(device=h_TD.device, dtype=kind)
    unembed_VD, limit = room.decoder.unembed_VD, room.logits_bytes
    return sweep(h_TD, unembed_VD, segments, targets, slope_M, logits_bytes=limit)


def _known_slopes(parts: list[_Part]) -> Tensor | None:
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


def _slopes(parts: list[_Part], logprobs: Sequence[Tensor]) -> Tensor:
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


def _slope(part: _Part, found: Tensor) -> Tensor:
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


def _custom_slope(part: _Part, found: Tensor) -> Tensor:
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


def _gradients(parts: list[_Part], h_TD: Tensor, swept: Swept) -> list[Tensor | None]:
    """Each part's gradient as a flat vector, None for those that run forward only."""
    leaves = {
        id(factor): factor
        for part in parts
        if part.backward
        for key, pair in part.leaves.pairs.items()
        if key[0] is not None
        for factor in pair
    }
    found: dict[int, Tensor] = {}
    if leaves:
        slopes = torch.autograd.grad(h_TD, list(leaves.values()), swept.dh_TD)
        found = dict(zip(leaves, slopes, strict=True))
    return [
        _flat(part, found, swept, index) if part.backward else None
        for index, part in enumerate(parts)
    ]


def _flat(part: _Part, found: dict[int, Tensor], swept: Swept, index: int) -> Tensor:
    leaves = part.leaves
    gradient = wrap(leaves.config, leaves.lora, torch.empty_like(leaves.flat_P))
    for key, pair in leaves.pairs.items():
        into = gradient.pairs[key]
        slopes = swept.pairs[index] if key[0] is None else [found[id(factor)] for factor in pair]
        for target, slope in zip(into, slopes, strict=True):
            target.copy_(slope)
    return gradient.flat_P


def _record(work: Work, logprobs: Tensor, gradient_P: Tensor | None) -> None:
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
