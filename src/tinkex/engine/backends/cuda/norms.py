# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain numbers for constants, which its signature denies.
"""Root-mean-square norms in one pass over each row, alone or after a residual addition.

The same values as `backends.torch.layers.rms_norm`: sums in float32, the normalised value rounded
to the input's dtype before the weight is applied. Weights are frozen, so only the rows have
gradients. The order of a row's sum depends on its width only, never on the number of rows; the
forward kernel is the same with and without gradients. `rope` fuses the norm of a head with its
rotation and shares the functions of this module.

Shapes: T tokens, N heads, D width of a row, R rows of one program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.backends.cuda.launcher import fast_launch

TILE = 2048
"""Elements of a program: narrow rows share a program up to this many."""


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to a root mean square of one, then by `weight_D`.

    Any leading shape; rows may be strided (a view of some heads of a joined projection). The
    result is contiguous.
    """
    y: Tensor = _RmsNorm.apply(x, weight_D, eps)
    return y


def add_rms_norm(
    h_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`h + delta` rounded to its dtype, and the norm of that: the residual stream's step."""
    h_new_TD, normed_TD = _AddRmsNorm.apply(h_TD, delta_TD, weight_D, eps)
    return h_new_TD, normed_TD


def row_tile(width: int) -> tuple[int, int, int]:
    """Columns (a power of two), rows and warps of a program over rows of this width."""
    columns = 1 << (width - 1).bit_length()
    rows = max(TILE // columns, 1)
    return columns, rows, 4 if columns * rows <= TILE else 8


def row_strides(x_TND: Tensor) -> tuple[int, int]:
    """Strides of tokens and heads, normalised where there is only one of them.

    The stride of a single row has no meaning but may be any number, and triton specialises
    kernels, and so perhaps the order of sums, for strides that are multiples of 16.
    """
    tokens, heads, width = x_TND.shape
    return (
        x_TND.stride(0) if tokens > 1 else heads * width,
        x_TND.stride(1) if heads > 1 else 0,
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        rows_TND = _rows(x)
        tokens, heads, width = rows_TND.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(tokens * heads, dtype=torch.float32, device=x.device)
        columns, tile, warps = row_tile(width)
        _norm[(triton.cdiv(tokens * heads, tile),)](
            rows_TND,
            weight_D,
            y,
            scale,
            tokens * heads,
            *row_strides(rows_TND),
            eps,
            HEADS=heads,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=tile,
            num_warps=warps,
        )
        ctx.save_for_backward(rows_TND, weight_D, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        rows_TND, weight_D, scale = ctx.saved_tensors
        return _gradient(rows_TND, weight_D, scale, dy, None), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        h_TD, delta_TD = dense_rows(h_TD), dense_rows(delta_TD)
        tokens, width = h_TD.shape
        h_new_TD = torch.empty(h_TD.shape, dtype=h_TD.dtype, device=h_TD.device)
        normed_TD = torch.empty_like(h_new_TD)
        scale_T = torch.empty(tokens, dtype=torch.float32, device=h_TD.device)
        columns, tile, warps = row_tile(width)
        _add_norm[(triton.cdiv(tokens, tile),)](
            h_TD,
            delta_TD,
            weight_D,
            h_new_TD,
            normed_TD,
            scale_T,
            tokens,
            row_strides(h_TD[:, None])[0],
            row_strides(delta_TD[:, None])[0],
            eps,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=tile,
            num_warps=warps,
        )
        ctx.save_for_backward(h_new_TD, weight_D, scale_T)
        ctx.set_materialize_grads(False)
        return h_new_TD, normed_TD

    @staticmethod
    def backward(
        ctx: Any, dh_TD: Tensor | None, dy_TD: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        h_new_TD, weight_D, scale_T = ctx.saved_tensors
        if dy_TD is None:
            return dh_TD, dh_TD, None, None
        total_TD = _gradient(h_new_TD[:, None], weight_D, scale_T, dy_TD, dh_TD)
        return total_TD, total_TD, None, None


def _rows(x: Tensor) -> Tensor:
    """`x` as [tokens, heads, width] without a copy where its strides allow."""
    x = dense_rows(x)
    if x.is_contiguous() or x.dim() > 3:
        return x.reshape(-1, 1, x.shape[-1])
    return x if x.dim() == 3 else x[:, None]


def dense_rows(x: Tensor) -> Tensor:
    """The tensor, copied if the elements of its rows are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gradient(
    x_TND: Tensor, weight_D: Tensor, scale: Tensor, dy: Tensor, residual: Tensor | None
) -> Tensor:
    """The gradient by `x`, plus `residual` if there is one, in the shape of `dy`."""
    tokens, heads, width = x_TND.shape
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    columns, tile, warps = row_tile(width)
    _norm_backward[(triton.cdiv(tokens * heads, tile),)](
        x_TND,
        weight_D,
        scale,
        dy,
        dy if residual is None else residual.contiguous(),
        dx,
        tokens * heads,
        *row_strides(x_TND),
        HAS_RESIDUAL=residual is not None,
        HEADS=heads,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=tile,
        num_warps=warps,
    )
    return dx


@triton.jit
def row_starts(row_R, token_stride, head_stride, HEADS: tl.constexpr):
    """Offsets of rows that are heads of tokens."""
    return (row_R // HEADS).to(tl.int64) * token_stride + (row_R % HEADS) * head_stride


@triton.jit
def rms_scale(squares_R, eps, WIDTH: tl.constexpr):
    """The factor that gives rows a root mean square of one, from their sums of squares."""
    return tl.rsqrt(squares_R / WIDTH + eps)


@triton.jit
def scaled(x_RD, scale_R, weight_RD, KIND: tl.constexpr):
    """The normalised rows times the weight, rounded after each of the two products."""
    rounded_RD = (x_RD * scale_R[:, None]).to(KIND).to(tl.float32)
    return (rounded_RD * weight_RD).to(KIND)


@triton.jit
def norm_gradient(dunit_RD, unit_RD, along_R, scale_R):
    """The gradient by the input, given that by the normalised rows and its mean along them.

    Scaling a whole row does not change its norm, so the component along the row is removed.
    """
    return (dunit_RD - unit_RD * along_R[:, None]) * scale_R[:, None]


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    weight,
    y,
    scale,
    rows,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, COLUMNS)
    live_RD = (row_R < rows)[:, None] & (col_D < WIDTH)[None, :]
    start_R = row_starts(row_R, token_stride, head_stride, HEADS)
    x_RD = tl.load(x + start_R[:, None] + col_D[None, :], mask=live_RD, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + col_D, mask=col_D < WIDTH, other=0.0).to(tl.float32)
    scale_R = rms_scale(tl.sum(x_RD * x_RD, 1), eps, WIDTH)
    out = y + row_R.to(tl.int64)[:, None] * WIDTH + col_D[None, :]
    tl.store(out, scaled(x_RD, scale_R, weight_D[None, :], y.dtype.element_ty), mask=live_RD)
    tl.store(scale + row_R, scale_R, mask=row_R < rows)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    h,
    delta,
    weight,
    h_new,
    normed,
    scale,
    rows,
    h_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, COLUMNS)
    live_RD = (row_R < rows)[:, None] & (col_D < WIDTH)[None, :]
    place_R = row_R.to(tl.int64)
    h_RD = tl.load(h + (place_R * h_stride)[:, None] + col_D[None, :], mask=live_RD, other=0.0).to(
        tl.float32
    )
    delta_RD = tl.load(
        delta + (place_R * delta_stride)[:, None] + col_D[None, :], mask=live_RD, other=0.0
    ).to(tl.float32)
    weight_D = tl.load(weight + col_D, mask=col_D < WIDTH, other=0.0).to(tl.float32)
    out_RD = place_R[:, None] * WIDTH + col_D[None, :]
    # Later layers read the rounded sum, so the norm is computed from it.
    sum_RD = (h_RD + delta_RD).to(h_new.dtype.element_ty)
    tl.store(h_new + out_RD, sum_RD, mask=live_RD)
    x_RD = sum_RD.to(tl.float32)
    scale_R = rms_scale(tl.sum(x_RD * x_RD, 1), eps, WIDTH)
    y_RD = scaled(x_RD, scale_R, weight_D[None, :], normed.dtype.element_ty)
    tl.store(normed + out_RD, y_RD, mask=live_RD)
    tl.store(scale + row_R, scale_R, mask=row_R < rows)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    x,
    weight,
    scale,
    dy,
    residual,
    dx,
    rows,
    token_stride,
    head_stride,
    HAS_RESIDUAL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, COLUMNS)
    live_RD = (row_R < rows)[:, None] & (col_D < WIDTH)[None, :]
    start_R = row_starts(row_R, token_stride, head_stride, HEADS)
    out_RD = row_R.to(tl.int64)[:, None] * WIDTH + col_D[None, :]
    x_RD = tl.load(x + start_R[:, None] + col_D[None, :], mask=live_RD, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + col_D, mask=col_D < WIDTH, other=0.0).to(tl.float32)
    scale_R = tl.load(scale + row_R, mask=row_R < rows, other=0.0)
    dunit_RD = tl.load(dy + out_RD, mask=live_RD, other=0.0).to(tl.float32) * weight_D[None, :]
    unit_RD = x_RD * scale_R[:, None]
    along_R = tl.sum(dunit_RD * unit_RD, 1) / WIDTH
    dx_RD = norm_gradient(dunit_RD, unit_RD, along_R, scale_R)
    if HAS_RESIDUAL:
        dx_RD += tl.load(residual + out_RD, mask=live_RD, other=0.0).to(tl.float32)
    tl.store(dx + out_RD, dx_RD.to(dx.dtype.element_ty), mask=live_RD)
