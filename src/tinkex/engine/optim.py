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
        # Parameters that never had a gradient would be 0/0 without it.
        ("eps", params.eps, 0 < params.eps < math.inf),
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
    old = (flat_P, gradient_P, moments.first_P, moments.second_P)
    new = tuple(torch.empty_like(flat_P) for _ in range(3))
    size = _BLOCK if flat_P.device.type == "cpu" else max(flat_P.numel(), 1)
    blocks = zip(*(torch.split(vector_P, size) for vector_P in (*old, *new)), strict=True)
    step = moments.step + 1
    norms = [_update(*block, clip=clip, step=step, params=params) for block in blocks]
    new_P, first_P, second_P = new
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
    torch.lerp(old_first_P, gradient_P, 1 - params.beta1, out=first_P)
    torch.mul(old_second_P, params.beta2, out=second_P)
    second_P.addcmul_(gradient_P, gradient_P, value=1 - params.beta2)
    # Both bias corrections in one factor.
    correction = math.sqrt(1 - params.beta2**step)
    change_P = second_P.sqrt().add_(params.eps * correction)
    torch.div(first_P, change_P, out=change_P)
    change_P.mul_(params.learning_rate * correction / (1 - params.beta1**step))
    if params.weight_decay:
        change_P.add_(flat_P, alpha=params.learning_rate * params.weight_decay)
    torch.sub(flat_P, change_P, out=new_P)
    return _norm(change_P)


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
