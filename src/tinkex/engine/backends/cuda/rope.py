# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain numbers for constants, which its signature denies.
"""Rotary position embedding, alone or fused with the norm of each head.

The same values as `backends.torch.layers.Rotation` (after `rms_norm`): computed in float32, rounded
where the reference rounds. The gradient is the inverse rotation, so only the angles are saved for
it; the norm also saves its input and one scale per head.

Shapes: T tokens, N heads, d head size, F = d/2 frequencies, R heads of one program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.backends.cuda.launcher import fast_launch
from tinkex.engine.backends.cuda.norms import (
    dense_rows,
    norm_gradient,
    rms_scale,
    row_starts,
    row_strides,
    row_tile,
    scaled,
)
from tinkex.engine.backends.torch.layers import concatenated_view


def rotate_pair(
    q_THd: Tensor,
    k_TGd: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    norms_2d: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys in one pass; gradients go to both.

    With weights for both, heads are normalised first, with the rounding of the separate norm.
    Where queries and keys are adjacent in memory, as in the output of a joined projection, nothing
    is copied; the results are views of one buffer.
    """
    q_new_THd, k_new_TGd = _Pair.apply(q_THd, k_TGd, cos_T1F, sin_T1F, norms_2d, eps)
    return q_new_THd, k_new_TGd


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        cos_T1F: Tensor,
        sin_T1F: Tensor,
        norms_2d: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, ...]:
        first, others = q_THd.shape[1], k_TGd.shape[1]
        x_TNd = _joined(q_THd, k_TGd)
        ctx.first = first
        if norms_2d is None:
            y_TNd = _rotated(x_TNd, cos_T1F, sin_T1F, back=False)
            ctx.save_for_backward(cos_T1F, sin_T1F)
        else:
            y_TNd, scale_TN = _normed_and_rotated(x_TNd, cos_T1F, sin_T1F, norms_2d, eps, first)
            ctx.save_for_backward(cos_T1F, sin_T1F, x_TNd, norms_2d, scale_TN)
        return y_TNd.split_with_sizes((first, others), dim=1)

    @staticmethod
    def backward(ctx: Any, dq_THd: Tensor, dk_TGd: Tensor) -> tuple[Tensor | None, ...]:
        dy_TNd = _joined(dq_THd, dk_TGd)
        cos_T1F, sin_T1F, *normed = ctx.saved_tensors
        if normed:
            dx_TNd = _norm_rotate_gradient(dy_TNd, cos_T1F, sin_T1F, *normed, ctx.first)
        else:
            dx_TNd = _rotated(dy_TNd, cos_T1F, sin_T1F, back=True)
        sizes = (ctx.first, dx_TNd.shape[1] - ctx.first)
        return (*dx_TNd.split_with_sizes(sizes, dim=1), None, None, None, None)


def _joined(a_TMd: Tensor, b_TNd: Tensor) -> Tensor:
    """The heads of both for every token, without a copy where they are adjacent already."""
    joined = concatenated_view((a_TMd, b_TNd))
    if joined is None or joined.stride()[1:] != (joined.shape[2], 1):
        return torch.cat((a_TMd, b_TNd), dim=1)
    return joined


def _rotated(x_TNd: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, *, back: bool) -> Tensor:
    x_TNd = dense_rows(x_TNd)
    y_TNd = _gradient_buffer(x_TNd) if back else _fresh(x_TNd)
    grid, shape = _launch(x_TNd)
    tokens, heads, _ = x_TNd.shape
    strides = (*row_strides(x_TNd), *row_strides(y_TNd))
    _rotate[grid](x_TNd, cos_T1F, sin_T1F, y_TNd, tokens * heads, *strides, BACK=back, **shape)
    return y_TNd


def _fresh(x_TNd: Tensor) -> Tensor:
    return torch.empty(x_TNd.shape, dtype=x_TNd.dtype, device=x_TNd.device)


def _gradient_buffer(dy_TNd: Tensor) -> Tensor:
    """The buffer for the gradient by the input, given that by the output.

    In place if the rows are part of longer rows: then the gradients of the values follow in the
    same buffer (see `attention_backward`), and the joined projection needs all three in one. A
    program reads its heads before it writes them.
    """
    _, heads, width = dy_TNd.shape
    return dy_TNd if dy_TNd.stride(0) > heads * width else _fresh(dy_TNd)


def _normed_and_rotated(
    x_TNd: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    norms_2d: Tensor,
    eps: float,
    first: int,
) -> tuple[Tensor, Tensor]:
    """The result, and the scale of each head."""
    y_TNd = _fresh(x_TNd)
    scale_TN = torch.empty(x_TNd.shape[:2], dtype=torch.float32, device=x_TNd.device)
    grid, shape = _launch(x_TNd)
    _norm_rotate[grid](
        x_TNd,
        norms_2d,
        cos_T1F,
        sin_T1F,
        y_TNd,
        scale_TN,
        scale_TN.numel(),
        *row_strides(x_TNd),
        eps,
        FIRST=first,
        **shape,
    )
    return y_TNd, scale_TN


def _norm_rotate_gradient(
    dy_TNd: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    x_TNd: Tensor,
    norms_2d: Tensor,
    scale_TN: Tensor,
    first: int,
) -> Tensor:
    dy_TNd = dense_rows(dy_TNd)
    dx_TNd = _gradient_buffer(dy_TNd)
    grid, shape = _launch(x_TNd)
    _norm_rotate_backward[grid](
        x_TNd,
        norms_2d,
        cos_T1F,
        sin_T1F,
        scale_TN,
        dy_TNd,
        dx_TNd,
        scale_TN.numel(),
        *row_strides(x_TNd),
        *row_strides(dy_TNd),
        *row_strides(dx_TNd),
        FIRST=first,
        **shape,
    )
    return dx_TNd


def _launch(x_TNd: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid over all heads, and the constants of these kernels."""
    tokens, heads, width = x_TNd.shape
    columns, rows, warps = row_tile(width)
    shape = {
        "HEADS": heads,
        "HALF": width // 2,
        "COLUMNS": max(columns // 2, 1),
        "ROWS": rows,
        "num_warps": warps,
    }
    return (-(-tokens * heads // rows),), shape


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x,
    cos,
    sin,
    y,
    rows,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_F = tl.arange(0, COLUMNS)
    live_RF = (row_R < rows)[:, None] & (col_F < HALF)[None, :]
    token_R = (row_R // HEADS).to(tl.int64)
    start_R = row_starts(row_R, token_stride, head_stride, HEADS)
    first = x + start_R[:, None] + col_F[None, :]
    a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32)
    b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32)
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    if BACK:
        sin_RF = -sin_RF
    out_R = row_starts(row_R, out_token_stride, out_head_stride, HEADS)
    out = y + out_R[:, None] + col_F[None, :]
    kind = y.dtype.element_ty
    tl.store(out, (a_RF * cos_RF - b_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(out + HALF, (b_RF * cos_RF + a_RF * sin_RF).to(kind), mask=live_RF)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_rotate(
    x,
    weight,
    cos,
    sin,
    y,
    scale,
    rows,
    token_stride,
    head_stride,
    eps,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_F = tl.arange(0, COLUMNS)
    live_RF = (row_R < rows)[:, None] & (col_F < HALF)[None, :]
    token_R = (row_R // HEADS).to(tl.int64)
    start_R = row_starts(row_R, token_stride, head_stride, HEADS)
    first = x + start_R[:, None] + col_F[None, :]
    a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32)
    b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32)
    scale_R = rms_scale(tl.sum(a_RF * a_RF + b_RF * b_RF, 1), eps, 2 * HALF)
    kind = y.dtype.element_ty
    weight_RF = weight + (row_R % HEADS >= FIRST)[:, None] * (2 * HALF) + col_F[None, :]
    weight_a_RF = tl.load(weight_RF, mask=live_RF, other=0.0).to(tl.float32)
    weight_b_RF = tl.load(weight_RF + HALF, mask=live_RF, other=0.0).to(tl.float32)
    a_RF = scaled(a_RF, scale_R, weight_a_RF, kind).to(tl.float32)
    b_RF = scaled(b_RF, scale_R, weight_b_RF, kind).to(tl.float32)
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    out = y + row_R.to(tl.int64)[:, None] * (2 * HALF) + col_F[None, :]
    tl.store(out, (a_RF * cos_RF - b_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(out + HALF, (b_RF * cos_RF + a_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(scale + row_R, scale_R, mask=row_R < rows)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_rotate_backward(
    x,
    weight,
    cos,
    sin,
    scale,
    dy,
    dx,
    rows,
    token_stride,
    head_stride,
    dy_token_stride,
    dy_head_stride,
    out_token_stride,
    out_head_stride,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_F = tl.arange(0, COLUMNS)
    live_RF = (row_R < rows)[:, None] & (col_F < HALF)[None, :]
    token_R = (row_R // HEADS).to(tl.int64)
    head_R = row_R % HEADS
    start_R = row_starts(row_R, token_stride, head_stride, HEADS)
    out_R = row_starts(row_R, out_token_stride, out_head_stride, HEADS)
    out_RF = out_R[:, None] + col_F[None, :]
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    dy_R = row_starts(row_R, dy_token_stride, dy_head_stride, HEADS)
    dy_first = dy + dy_R[:, None] + col_F[None, :]
    da_RF = tl.load(dy_first, mask=live_RF, other=0.0).to(tl.float32)
    db_RF = tl.load(dy_first + HALF, mask=live_RF, other=0.0).to(tl.float32)
    weight_RF = weight + (head_R >= FIRST)[:, None] * (2 * HALF) + col_F[None, :]
    weight_a_RF = tl.load(weight_RF, mask=live_RF, other=0.0).to(tl.float32)
    weight_b_RF = tl.load(weight_RF + HALF, mask=live_RF, other=0.0).to(tl.float32)
    dunit_a_RF = (da_RF * cos_RF + db_RF * sin_RF) * weight_a_RF
    dunit_b_RF = (db_RF * cos_RF - da_RF * sin_RF) * weight_b_RF
    scale_R = tl.load(scale + row_R, mask=row_R < rows, other=0.0)
    first = x + start_R[:, None] + col_F[None, :]
    unit_a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32) * scale_R[:, None]
    unit_b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32) * scale_R[:, None]
    along_R = tl.sum(dunit_a_RF * unit_a_RF + dunit_b_RF * unit_b_RF, 1) / (2 * HALF)
    dx_a_RF = norm_gradient(dunit_a_RF, unit_a_RF, along_R, scale_R)
    dx_b_RF = norm_gradient(dunit_b_RF, unit_b_RF, along_R, scale_R)
    tl.store(dx + out_RF, dx_a_RF.to(dx.dtype.element_ty), mask=live_RF)
    tl.store(dx + out_RF + HALF, dx_b_RF.to(dx.dtype.element_ty), mask=live_RF)
