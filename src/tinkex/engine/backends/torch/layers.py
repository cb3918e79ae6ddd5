"""The pieces every family shares: norm, rotary positions, gated MLP activation.

Norms and rotations are computed in float32 or better and rounded once, whatever the weights'
dtype. Each has an autograd function of its own: it saves fewer tensors and reads memory less often
than what autograd would derive. Gradients exist for activations only, because weights are frozen.

Shapes: T tokens, D hidden, N heads of either kind, d head size, F = d/2 frequencies,
Y = N*d, M intermediate size.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to a root mean square of one, then by `weight`."""
    if _differentiates(x):
        return cast("Tensor", _RmsNorm.apply(x, weight, eps))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    return _rms_norm(x, weight, eps)[0]


def _differentiates(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and the scale of each row."""
    exact = _exact(x)
    scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (exact * scale).to(x.dtype).mul_(weight), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        exact = _exact(x)
        # The gradient by the normalised row, less its projection onto the row.
        dx = _exact(grad_outputs[0]) * weight
        along = (dx * exact).mean(-1, keepdim=True).mul_(scale).mul_(scale)
        return dx.sub_(exact * along).mul_(scale).to(x.dtype), None, None


def split_heads(x_TY: Tensor, head_dim: int) -> Tensor:
    """See each token's row as heads: x_TNd."""
    tokens, width = x_TY.shape
    return x_TY.reshape(tokens, width // head_dim, head_dim)


def add_norm(h_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h + delta`, and its norm."""
    h_TD = h_TD + delta_TD
    return h_TD, rms_norm(h_TD, weight, eps)


def rotated_heads(
    q_TX: Tensor,
    k_TY: Tensor,
    rotation: Rotation,
    norms_2d: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys as heads, rotated; given weights for both, normalised before."""
    head_dim = 2 * rotation.cos_T1F.shape[-1]
    q_THd, k_TGd = split_heads(q_TX, head_dim), split_heads(k_TY, head_dim)
    if norms_2d is not None:
        q_THd = rms_norm(q_THd, norms_2d[0], eps)
        k_TGd = rms_norm(k_TGd, norms_2d[1], eps)
    elif (
        not _differentiates(q_TX) and (joined_TNd := concatenated_view((q_THd, k_TGd))) is not None
    ):
        both = rotation(joined_TNd).split_with_sizes((q_THd.shape[1], k_TGd.shape[1]), dim=1)
        return both[0], both[1]
    return rotation(q_THd), rotation(k_TGd)


def swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """The gated activation between the MLP's projections."""
    if _differentiates(gate_TM):
        return cast("Tensor", _Swiglu.apply(gate_TM, up_TM))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    return _swiglu(gate_TM, up_TM)


def _swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    tokens, width = gate_TM.shape
    if gate_TM.device.type != "cpu":
        return F.silu(gate_TM).mul_(up_TM)
    if width % SILU_STEP:
        # exp gives the same bits at every offset; silu does not.
        return torch.div(gate_TM, torch.neg(gate_TM).exp_().add_(1.0)).mul_(up_TM)
    if tokens * width < SILU_ALONE:  # computed by one thread
        return F.silu(gate_TM).mul_(up_TM)
    y_TM = torch.empty(gate_TM.shape, dtype=gate_TM.dtype)
    for rows in _whole_steps(tokens, width, torch.get_num_threads()):
        torch.ops.aten.silu(gate_TM[rows], out=y_TM[rows])
    return y_TM.mul_(up_TM)


SILU_STEP: Final = 32
"""The vector width of torch's silu on a CPU: see `_whole_steps`."""
SILU_ALONE: Final = 32_768
"""torch splits a tensor of this many elements or more between threads."""


def _whole_steps(tokens: int, width: int, threads: int) -> Iterator[slice]:
    """Rows for which torch's silu gives every number the same bits.

    It processes `SILU_STEP` elements at a time, and the remainder of a thread's share with other
    code. Here every thread's share is a whole number of rows: either all threads get the same
    number of rows, or there are so few that one thread computes them.
    """
    start = tokens - tokens % threads
    if threads == 1 or start * width < SILU_ALONE * threads:
        start = 0
    if start:
        yield slice(start)
    step = max((SILU_ALONE - 1) // width if threads > 1 else tokens, 1)
    for first in range(start, tokens, step):
        yield slice(first, first + step)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TM, up_TM)
        return _swiglu(gate_TM, up_TM)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy_TM,), (gate_TM, up_TM) = grad_outputs, ctx.saved_tensors
        tokens, width = dy_TM.shape
        # One buffer: the backward product with the joined weight needs no copy.
        dgate_TM, dup_TM = dy_TM.new_empty(tokens, 2 * width).chunk(2, dim=1)
        torch.mul(F.silu(gate_TM), dy_TM, out=dup_TM)
        torch.mul(dy_TM, up_TM, out=dgate_TM)
        torch.ops.aten.silu_backward(dgate_TM, gate_TM, grad_input=dgate_TM)
        return dgate_TM, dup_TM


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine per token and frequency, shared by all layers of one pass."""

    cos_T1F: Tensor
    sin_T1F: Tensor

    @cached_property
    def _factors_T1d(self) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of a head, of its swapped halves, and of those for the inverse rotation."""
        cos, sin = self.cos_T1F, self.sin_T1F
        forth = torch.cat((-sin, sin), dim=-1)
        return torch.cat((cos, cos), dim=-1), forth, -forth

    def __call__(self, x_TNd: Tensor) -> Tensor:
        """Rotate each head's first half against its second."""
        if _differentiates(x_TNd):
            return cast("Tensor", _Rotate.apply(x_TNd, self))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        return self.rotated(x_TNd)

    def rotated(self, x_TNd: Tensor, *, back: bool = False) -> Tensor:
        """The rotated heads outside autograd; `back` applies the inverse rotation."""
        own_T1d, forth_T1d, back_T1d = self._factors_T1d
        exact_TNd = _exact(x_TNd)
        swapped_TNd = exact_TNd.roll(own_T1d.shape[-1] // 2, -1)
        y_TNd = (exact_TNd * own_T1d).add_(swapped_TNd.mul_(back_T1d if back else forth_T1d))
        return y_TNd.to(x_TNd.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNd: Tensor, rotation: Rotation) -> Tensor:
        ctx.rotation = rotation
        return rotation.rotated(x_TNd)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.rotation.rotated(grad_outputs[0], back=True), None


def rotation(positions_T: Tensor, frequencies_F: Tensor) -> Rotation:
    """The rotation of tokens at these positions of their sequences."""
    if positions_T.device.type != "cpu":
        angles_T1F = (positions_T.float()[:, None] * frequencies_F)[:, None, :]
        return Rotation(angles_T1F.cos(), angles_T1F.sin())
    # Without MKL, a large angle changes how the other elements of its SIMD vector are computed. So
    # no vector may hold angles of two tokens: rows are padded to whole vectors, and one thread
    # computes all rows, because several would split a row between them.
    count = frequencies_F.shape[0]
    filled = F.pad(frequencies_F, (0, -count % _ANGLES_STEP))
    angles_T1F = (positions_T.float()[:, None] * filled)[:, None, :]
    with on_threads(1):
        cos_T1F, sin_T1F = angles_T1F.cos(), angles_T1F.sin()
    return Rotation(cos_T1F[..., :count].contiguous(), sin_T1F[..., :count].contiguous())


_ANGLES_STEP: Final = 16
"""Elements of the longest SIMD vector that torch uses."""


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
    # The number of periods within the pre-training context decides how much a frequency is scaled.
    waves_F = scaling.original_max_context * plain_F / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep_F = ((waves_F - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - keep_F) * plain_F / scaling.factor + keep_F * plain_F


@contextmanager
def on_threads(count: int) -> Generator[None]:
    """Set the number of torch's intra-op threads within the block."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def concatenated_view(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one view along dimension 1, or None where they are not adjacent in memory."""
    first = parts[0]
    memory, strides, start = _memory(first), first.stride(), first.storage_offset()
    for part in parts:
        if (_memory(part), part.stride(), part.storage_offset()) != (memory, strides, start):
            return None
        start += part.shape[1] * strides[1]
    tokens, _, *rest = first.shape
    return first.as_strided((tokens, sum(part.shape[1] for part in parts), *rest), strides)


def _memory(part: Tensor) -> int:
    """The address of the tensor's storage."""
    # `untyped_storage()` takes several times as long.
    return part.data_ptr() - int(part.storage_offset()) * part.itemsize
