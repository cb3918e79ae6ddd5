# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain numbers for constants, which its signature denies.
"""Rotary positions, alone or right after a head's norm.

The same numbers as `models.layers.Rotation` (after `rms_norm`): computed in float32, rounded
where the plain functions round. Turning back by the same angle is the gradient, so nothing
but the angles is kept for it; the norm keeps its input and one scale per head.

Shapes: T tokens, N heads, d head size, F = d/2 frequencies, R heads of one program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.kernels.norms import row_strides, row_tile


def rotate(x_TNd: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotate each head's first half against its second; the result is contiguous.

    Tokens and heads of `x_TNd` may lie apart. `cos` and `sin` are float32 and contiguous.
    """
    y_TNd: Tensor = _Rotate.apply(x_TNd, cos_T1F, sin_T1F)
    return y_TNd


def norm_rotate(
    x_TNd: Tensor, weight_d: Tensor, eps: float, cos_T1F: Tensor, sin_T1F: Tensor
) -> Tensor:
    """`rotate(rms_norm(x))` of every head in one pass; gradients go to `x_TNd` only."""
    y_TNd: Tensor = _NormRotate.apply(x_TNd, weight_d, eps, cos_T1F, sin_T1F)
    return y_TNd


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNd: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1F, sin_T1F)
        return _turned(x_TNd, cos_T1F, sin_T1F, back=False)

    @staticmethod
    def backward(ctx: Any, dy_TNd: Tensor) -> tuple[Tensor, None, None]:
        return _turned(dy_TNd, *ctx.saved_tensors, back=True), None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TNd: Tensor, weight_d: Tensor, eps: float, cos_T1F: Tensor, sin_T1F: Tensor
    ) -> Tensor:
        x_TNd = _dense_rows(x_TNd)
        y_TNd = torch.empty(x_TNd.shape, dtype=x_TNd.dtype, device=x_TNd.device)
        scale_TN = torch.empty(x_TNd.shape[:2], dtype=torch.float32, device=x_TNd.device)
        grid, shape = _launch(x_TNd)
        _norm_rotate[grid](
            x_TNd,
            weight_d,
            cos_T1F,
            sin_T1F,
            y_TNd,
            scale_TN,
            scale_TN.numel(),
            *row_strides(x_TNd),
            eps,
            **shape,
        )
        ctx.save_for_backward(x_TNd, weight_d, cos_T1F, sin_T1F, scale_TN)
        return y_TNd

    @staticmethod
    def backward(ctx: Any, dy_TNd: Tensor) -> tuple[Tensor, None, None, None, None]:
        x_TNd, weight_d, cos_T1F, sin_T1F, scale_TN = ctx.saved_tensors
        dy_TNd = dy_TNd.contiguous()
        dx_TNd = torch.empty_like(dy_TNd)
        grid, shape = _launch(x_TNd)
        _norm_rotate_backward[grid](
            x_TNd,
            weight_d,
            cos_T1F,
            sin_T1F,
            scale_TN,
            dy_TNd,
            dx_TNd,
            scale_TN.numel(),
            *row_strides(x_TNd),
            **shape,
        )
        return dx_TNd, None, None, None, None


def _turned(x_TNd: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, *, back: bool) -> Tensor:
    x_TNd = _dense_rows(x_TNd)
    y_TNd = torch.empty(x_TNd.shape, dtype=x_TNd.dtype, device=x_TNd.device)
    grid, shape = _launch(x_TNd)
    tokens, heads, _ = x_TNd.shape
    _rotate[grid](
        x_TNd, cos_T1F, sin_T1F, y_TNd, tokens * heads, *row_strides(x_TNd), BACK=back, **shape
    )
    return y_TNd


def _dense_rows(x_TNd: Tensor) -> Tensor:
    return x_TNd if x_TNd.stride(-1) == 1 else x_TNd.contiguous()


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


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x,
    cos,
    sin,
    y,
    rows,
    token_stride,
    head_stride,
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
    start_R = token_R * token_stride + (row_R % HEADS) * head_stride
    first = x + start_R[:, None] + col_F[None, :]
    a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32)
    b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32)
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    if BACK:
        sin_RF = -sin_RF
    out = y + row_R.to(tl.int64)[:, None] * (2 * HALF) + col_F[None, :]
    kind = y.dtype.element_ty
    tl.store(out, (a_RF * cos_RF - b_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(out + HALF, (b_RF * cos_RF + a_RF * sin_RF).to(kind), mask=live_RF)


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
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_F = tl.arange(0, COLUMNS)
    live_F = col_F < HALF
    live_RF = (row_R < rows)[:, None] & live_F[None, :]
    token_R = (row_R // HEADS).to(tl.int64)
    start_R = token_R * token_stride + (row_R % HEADS) * head_stride
    first = x + start_R[:, None] + col_F[None, :]
    a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32)
    b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32)
    squares_R = tl.sum(a_RF * a_RF + b_RF * b_RF, 1)
    scale_R = tl.rsqrt(squares_R / (2 * HALF) + eps)
    kind = y.dtype.element_ty
    weight_a_F = tl.load(weight + col_F, mask=live_F, other=0.0).to(tl.float32)
    weight_b_F = tl.load(weight + HALF + col_F, mask=live_F, other=0.0).to(tl.float32)
    # Rounded after the scale and after the weight, as the norm by itself would be.
    a_RF = (a_RF * scale_R[:, None]).to(kind).to(tl.float32) * weight_a_F[None, :]
    b_RF = (b_RF * scale_R[:, None]).to(kind).to(tl.float32) * weight_b_F[None, :]
    a_RF = a_RF.to(kind).to(tl.float32)
    b_RF = b_RF.to(kind).to(tl.float32)
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    out = y + row_R.to(tl.int64)[:, None] * (2 * HALF) + col_F[None, :]
    tl.store(out, (a_RF * cos_RF - b_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(out + HALF, (b_RF * cos_RF + a_RF * sin_RF).to(kind), mask=live_RF)
    tl.store(scale + row_R, scale_R, mask=row_R < rows)


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
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_F = tl.arange(0, COLUMNS)
    live_F = col_F < HALF
    live_RF = (row_R < rows)[:, None] & live_F[None, :]
    token_R = (row_R // HEADS).to(tl.int64)
    start_R = token_R * token_stride + (row_R % HEADS) * head_stride
    out_RF = row_R.to(tl.int64)[:, None] * (2 * HALF) + col_F[None, :]
    angle_RF = token_R[:, None] * HALF + col_F[None, :]
    cos_RF = tl.load(cos + angle_RF, mask=live_RF, other=0.0)
    sin_RF = tl.load(sin + angle_RF, mask=live_RF, other=0.0)
    da_RF = tl.load(dy + out_RF, mask=live_RF, other=0.0).to(tl.float32)
    db_RF = tl.load(dy + out_RF + HALF, mask=live_RF, other=0.0).to(tl.float32)
    weight_a_F = tl.load(weight + col_F, mask=live_F, other=0.0).to(tl.float32)
    weight_b_F = tl.load(weight + HALF + col_F, mask=live_F, other=0.0).to(tl.float32)
    slope_a_RF = (da_RF * cos_RF + db_RF * sin_RF) * weight_a_F[None, :]
    slope_b_RF = (db_RF * cos_RF - da_RF * sin_RF) * weight_b_F[None, :]
    scale_R = tl.load(scale + row_R, mask=row_R < rows, other=0.0)
    first = x + start_R[:, None] + col_F[None, :]
    unit_a_RF = tl.load(first, mask=live_RF, other=0.0).to(tl.float32) * scale_R[:, None]
    unit_b_RF = tl.load(first + HALF, mask=live_RF, other=0.0).to(tl.float32) * scale_R[:, None]
    # Growing the whole head changes nothing, so the part of the slope along it drops out.
    along_R = tl.sum(slope_a_RF * unit_a_RF + slope_b_RF * unit_b_RF, 1) / (2 * HALF)
    dx_a_RF = (slope_a_RF - unit_a_RF * along_R[:, None]) * scale_R[:, None]
    dx_b_RF = (slope_b_RF - unit_b_RF * along_R[:, None]) * scale_R[:, None]
    tl.store(dx + out_RF, dx_a_RF.to(dx.dtype.element_ty), mask=live_RF)
    tl.store(dx + out_RF + HALF, dx_b_RF.to(dx.dtype.element_ty), mask=live_RF)
