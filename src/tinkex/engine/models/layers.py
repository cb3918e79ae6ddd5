"""The pieces every family shares: norm, rotary positions, gated MLP activation.

Norms and rotations are computed in float32 and rounded once, whatever the weights' dtype.

Shapes: T tokens, D hidden, N heads of either kind, d head size, F = d/2 frequencies,
Y = N*d,
M intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional as F

from tinkex.engine.kernels import has_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.models.base import DecoderConfig, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to a root mean square of one, then by `weight`."""
    if has_kernels(x):
        from tinkex.engine.kernels.norms import rms_norm as kernel

        return kernel(x, weight, eps)
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (x_f32 * scale).to(x.dtype) * weight


def split_heads(x_TY: Tensor, head_dim: int) -> Tensor:
    """See each token's row as heads: x_TNd."""
    tokens, width = x_TY.shape
    return x_TY.reshape(tokens, width // head_dim, head_dim)


def add_norm(h_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h + delta`, and its norm."""
    if has_kernels(h_TD):
        from tinkex.engine.kernels.norms import add_rms_norm

        return add_rms_norm(h_TD, delta_TD, weight, eps)
    h_TD = h_TD + delta_TD
    return h_TD, rms_norm(h_TD, weight, eps)


def norm_rotated(x_TNd: Tensor, weight: Tensor, eps: float, rotate: Rotation) -> Tensor:
    """Normalise each head, then rotate it."""
    if has_kernels(x_TNd):
        from tinkex.engine.kernels.rope import norm_rotate

        return norm_rotate(x_TNd, weight, eps, rotate.cos_T1F, rotate.sin_T1F)
    return rotate(rms_norm(x_TNd, weight, eps))


def swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """The gated activation between the MLP's projections."""
    if has_kernels(gate_TM):
        from tinkex.engine.kernels.swiglu import swiglu as kernel

        return kernel(gate_TM, up_TM)
    return cast("Tensor", _Swiglu.apply(gate_TM, up_TM))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


class _Swiglu(torch.autograd.Function):
    """`gate / (1 + exp(-gate)) * up`

    Written out because torch's silu gives the numbers at the ends of its loops other bits
    than those within; exp does not.
    """

    @staticmethod
    def forward(ctx: Any, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TM, up_TM)
        y_TM = gate_TM.neg().exp_().add_(1.0)
        return torch.div(gate_TM, y_TM, out=y_TM).mul_(up_TM)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        (dy_TM,), (gate_TM, up_TM) = slopes, ctx.saved_tensors
        dgate_TM = torch.ops.aten.silu_backward(dy_TM * up_TM, gate_TM)
        return dgate_TM, F.silu(gate_TM).mul_(dy_TM)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine per token and frequency, shared by all layers of one pass."""

    cos_T1F: Tensor
    sin_T1F: Tensor

    def __call__(self, x_TNd: Tensor) -> Tensor:
        """Rotate each head's first half against its second."""
        if has_kernels(x_TNd):
            from tinkex.engine.kernels.rope import rotate

            return rotate(x_TNd, self.cos_T1F, self.sin_T1F)
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
