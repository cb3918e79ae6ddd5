"""One AdamW update of an adapter's flat parameters.

Shapes: P all parameters of an adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.types import AdamParams

_BLOCK: Final = 2**17
"""Parameters updated at a time on a CPU, so that all their state stays in the cache."""


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state, and how many steps it has seen."""

    first_P: Tensor
    second_P: Tensor
    step: int = 0


def fresh_moments(flat_P: Tensor) -> Moments:
    """The state before the first step."""
    return Moments(torch.zeros_like(flat_P), torch.zeros_like(flat_P))


def adamw(
    old: Sequence[Tensor], new: Sequence[Tensor], *, clip: float, step: int, params: AdamParams
) -> float:
    """Write new parameters and moments; return the norm of the change.

    `old` are parameters, gradient and both moments; `new` are outputs: parameters and moments.
    """
    size = _BLOCK if old[0].device.type == "cpu" else max(old[0].numel(), 1)
    blocks = zip(*(torch.split(vector_P, size) for vector_P in (*old, *new)), strict=True)
    norms = [
        _update(*block, clip=clip, step=step, params=params) for block in blocks if block[0].numel()
    ]
    return math.hypot(*norms)


def _update(
    flat_P: Tensor,
    gradient_P: Tensor,
    old_first_P: Tensor,
    old_second_P: Tensor,
    new_P: Tensor,
    first_P: Tensor,
    second_P: Tensor,
    *,
    clip: float,
    step: int,
    params: AdamParams,
) -> float:
    """Write a block's new parameters and moments; return the norm of its change."""
    if clip != 1.0:
        gradient_P = gradient_P * clip
    new_P.copy_(flat_P)
    first_P.copy_(old_first_P)
    second_P.copy_(old_second_P)
    # torch's fused update, one pass over memory; it works in place.
    torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- the public way is an optimizer that owns its state
        [new_P],
        [gradient_P],
        [first_P],
        [second_P],
        list["Tensor"](),
        [torch.full((), float(step), device=flat_P.device)],
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )
    return norm_of(new_P - flat_P)


def norm_of(flat_P: Tensor) -> float:
    """The norm, block by block: float32 loses digits over millions of terms."""
    if flat_P.is_cuda:  # one launch, summed in double precision
        norm = torch.linalg.vector_norm(flat_P, dtype=torch.float64)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- torch's own stub
        return float(cast("Tensor", norm))
    blocks = [_block_norm(part) for part in torch.split(flat_P, 2**16)]
    return float(_block_norm(torch.stack(blocks).double()))


def _block_norm(part: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(part)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- torch's own stub
    return cast("Tensor", norm)
