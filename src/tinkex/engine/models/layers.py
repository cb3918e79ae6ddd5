"""The pieces every family shares: norm, rotary positions, gated MLP activation.

Norms and rotations are computed in float32 and rounded once, whatever the weights' dtype.

Shapes: T tokens, D hidden, N heads of either kind, d head size, F = d/2 frequencies,
Y = N*d,
M intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.models.base import DecoderConfig, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to a root mean square of one, then by `weight`."""
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (x_f32 * scale).to(x.dtype) * weight


def split_heads(x_TY: Tensor, head_dim: int) -> Tensor:
    """See each token's row as heads: x_TNd."""
    tokens, width = x_TY.shape
    return x_TY.reshape(tokens, width // head_dim, head_dim)


def swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """The gated activation between the MLP's projections."""
    return F.silu(gate_TM) * up_TM


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine per token and frequency, shared by all layers of one pass."""

    cos_T1F: Tensor
    sin_T1F: Tensor

    def __call__(self, x_TNd: Tensor) -> Tensor:
        """Rotate each head's first half against its second."""
        a_TNF, b_TNF = x_TNd.float().chunk(2, dim=-1)
        cos, sin = self.cos_T1F, self.sin_T1F
        turned = torch.cat((a_TNF * cos - b_TNF * sin, b_TNF * cos + a_TNF * sin), dim=-1)
        return turned.to(x_TNd.dtype)


def rotation(positions_T: Tensor, frequencies_F: Tensor) -> Rotation:
    """The rotation of tokens at these positions of their sequences."""
    angles_T1F = (positions_T.float()[:, None] * frequencies_F)[:, None, :]
    return Rotation(angles_T1F.cos(), angles_T1F.sin())


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position for each pair of dimensions, float32 on the CPU."""
    exponent_F = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain_F = 1.0 / (config.rope_theta**exponent_F)
    scaling = config.rope_scaling
    if scaling is None:
        return plain_F
    if scaling.kind == "linear":
        return plain_F / scaling.factor
    if scaling.kind == "factors":
        return plain_F / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(plain_F, scaling)


def _llama3(plain_F: Tensor, scaling: RopeScaling) -> Tensor:
    # How often each wave fits into the context of pre-training decides how much it is stretched.
    waves_F = scaling.original_max_context * plain_F / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep_F = ((waves_F - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - keep_F) * plain_F / scaling.factor + keep_F * plain_F
