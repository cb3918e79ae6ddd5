"""One optimizer step on an adapter's flat parameters: clip, AdamW, metrics.

Shapes: P all parameters of an adapter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tinkex.engine.backends.torch.adamw import Moments, norm_of
from tinkex.errors import InputError
from tinkex.types import AdamParams

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.backends.table import Backend
    from tinkex.types import OptimizerConfig, OptimParams


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
    flat_P: Tensor, gradient_P: Tensor, moments: Moments, params: AdamParams, backend: Backend
) -> tuple[Tensor, Moments, dict[str, float]]:
    """New parameters, new state and metrics; nothing is changed in place.

    The gradient is first scaled to a norm of at most `grad_clip_norm`. Weight decay acts on
    the parameters directly, not through the moments.
    """
    norm = norm_of(gradient_P)
    clipped = 0 < params.grad_clip_norm < norm
    clip = params.grad_clip_norm / norm if clipped else 1.0
    new_P, first_P, second_P = (torch.empty_like(flat_P) for _ in range(3))
    old = (flat_P, gradient_P, moments.first_P, moments.second_P)
    new = (new_P, first_P, second_P)
    step = moments.step + 1
    change = backend.adamw(old, new, clip=clip, step=step, params=params)
    metrics = {
        "grad_norm": norm,
        "grad_norm_clipped": params.grad_clip_norm if clipped else norm,
        "update_norm": change,
        "learning_rate": params.learning_rate,
        "step": float(step),
    }
    return new_P, Moments(first_P, second_P, step), metrics
