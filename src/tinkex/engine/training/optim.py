"""One optimizer step on an adapter's flat parameters: clip, AdamW, metrics.

Shapes: P all parameters of an adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch

from tinkex.errors import InputError
from tinkex.types import AdamParams

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.types import OptimizerConfig, OptimParams


_BLOCK: Final = 2**17
"""On a CPU so many parameters are updated at a time: what belongs to them stays in the cache."""


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state, and how many steps it has seen."""

    first_P: Tensor
    second_P: Tensor
    step: int = 0


def fresh_moments(flat_P: Tensor) -> Moments:
    """The state before the first step."""
    return Moments(torch.zeros_like(flat_P), torch.zeros_like(flat_P))


def check_optimizer(config: OptimizerConfig) -> None:
    """Refuse an optimizer this engine does not have."""
    if config.type != "adamw":
        raise InputError(_no_such(config.type), "optimizer_config.type")


def check_params(params: OptimParams) -> AdamParams:
    """The settings of one AdamW step, or what is wrong with them."""
    if not isinstance(params, AdamParams):
        raise InputError(_no_such(params.type), "optim_params.type")
    for name, value, good in (
        ("learning_rate", params.learning_rate, 0 <= params.learning_rate < math.inf),
        ("beta1", params.beta1, 0 <= params.beta1 < 1),
        ("beta2", params.beta2, 0 <= params.beta2 < 1),
        # Parameters that never had a gradient would be 0/0 without it, in their precision.
        ("eps", params.eps, torch.finfo(torch.float32).tiny <= params.eps < math.inf),
        ("weight_decay", params.weight_decay, 0 <= params.weight_decay < math.inf),
        ("grad_clip_norm", params.grad_clip_norm, not math.isnan(params.grad_clip_norm)),
    ):
        if not good:
            raise InputError(f"{value} is out of range", f"optim_params.{name}")
    return params


def _no_such(kind: str) -> str:
    unpublished = ": its vendor has not published the whole update rule"
    reason = unpublished if kind == "dimuon" else ""
    return f"{kind!r} is not offered by this engine{reason}; there is adamw"


def adamw_step(
    flat_P: Tensor, gradient_P: Tensor, moments: Moments, params: AdamParams
) -> tuple[Tensor, Moments, dict[str, float]]:
    """New parameters, new state and metrics; nothing is changed in place.

    The gradient is first scaled to a norm of at most `grad_clip_norm`. Weight decay acts on
    the parameters directly, not through the moments.
    """
    norm = _norm(gradient_P)
    clipped = 0 < params.grad_clip_norm < norm
    clip = params.grad_clip_norm / norm if clipped else 1.0
    new_P, first_P, second_P = (torch.empty_like(flat_P) for _ in range(3))
    old = (flat_P, gradient_P, moments.first_P, moments.second_P)
    new = (new_P, first_P, second_P)
    step = moments.step + 1
    size = _BLOCK if flat_P.device.type == "cpu" else max(flat_P.numel(), 1)
    rest = (torch.split(vector_P, size) for vector_P in (*old, *new))
    norms = [
        _update(*block, clip=clip, step=step, params=params)
        for block in zip(*rest, strict=True)
        if block[0].numel()
    ]
    metrics = {
        "grad_norm": norm,
        "grad_norm_clipped": params.grad_clip_norm if clipped else norm,
        "update_norm": math.hypot(*norms),
        "learning_rate": params.learning_rate,
        "step": float(step),
    }
    return new_P, Moments(first_P, second_P, step), metrics


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
    # torch's own update, one pass over everything; it works in place.
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
    return _norm(new_P - flat_P)


def _norm(flat_P: Tensor) -> float:
    """Block by block: float32 loses digits over millions of terms."""
    if flat_P.is_cuda:  # one launch, summed in double precision
        norm = torch.linalg.vector_norm(flat_P, dtype=torch.float64)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- torch's own stub
        return float(cast("Tensor", norm))
    blocks = [_block_norm(part) for part in torch.split(flat_P, 2**16)]
    return float(_block_norm(torch.stack(blocks).double()))


def _block_norm(part: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(part)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- torch's own stub
    return cast("Tensor", norm)
