# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain numbers for constants, which its signature denies.
"""The gated activation between the MLP's projections, in one pass.

Computed in float32 and rounded once. Both gradients are written to one buffer, so that the backward
product with the joined gate and up projections needs no copy.

Shapes: T tokens, M intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.backends.cuda.launcher import fast_launch
from tinkex.engine.backends.cuda.norms import dense_rows

COLUMNS = 1024
"""Columns of one program: four warps, 16 bytes of bf16 for each thread."""


def swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """`silu(gate) * up`; rows may be strided, the result is contiguous."""
    y_TM: Tensor = _Swiglu.apply(gate_TM, up_TM)
    return y_TM


def swiglu_gradients(gate_TM: Tensor, up_TM: Tensor, dy_TM: Tensor) -> Tensor:
    """The gradient by the gate, then by the up projection, in one buffer [T, 2M]."""
    gate_TM, up_TM, dy_TM = dense_rows(gate_TM), dense_rows(up_TM), dense_rows(dy_TM)
    tokens, width = gate_TM.shape
    both = torch.empty((tokens, 2 * width), dtype=gate_TM.dtype, device=gate_TM.device)
    _swiglu_backward[(tokens, triton.cdiv(width, COLUMNS))](
        gate_TM,
        up_TM,
        dy_TM,
        both,
        gate_TM.stride(0),
        up_TM.stride(0),
        dy_TM.stride(0),
        WIDTH=width,
        BLOCK=COLUMNS,
        num_warps=4,
    )
    return both


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        gate_TM, up_TM = dense_rows(gate_TM), dense_rows(up_TM)
        tokens, width = gate_TM.shape
        y_TM = torch.empty((tokens, width), dtype=gate_TM.dtype, device=gate_TM.device)
        _swiglu[(tokens, triton.cdiv(width, COLUMNS))](
            gate_TM,
            up_TM,
            y_TM,
            gate_TM.stride(0),
            up_TM.stride(0),
            WIDTH=width,
            BLOCK=COLUMNS,
            num_warps=4,
        )
        ctx.save_for_backward(gate_TM, up_TM)
        return y_TM

    @staticmethod
    def backward(ctx: Any, dy_TM: Tensor) -> tuple[Tensor, Tensor]:
        gate_TM, up_TM = ctx.saved_tensors
        both = swiglu_gradients(gate_TM, up_TM, dy_TM)
        return both[:, : gate_TM.shape[1]], both[:, gate_TM.shape[1] :]


@triton.jit
def _sigmoid(x):
    """The logistic function without an overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@fast_launch
@triton.jit
def _swiglu(gate, up, y, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < WIDTH
    gate_value = tl.load(gate + row * gate_stride + col, mask=live, other=0.0).to(tl.float32)
    up_value = tl.load(up + row * up_stride + col, mask=live, other=0.0).to(tl.float32)
    value = gate_value * _sigmoid(gate_value) * up_value
    tl.store(y + row * WIDTH + col, value.to(y.dtype.element_ty), mask=live)


@fast_launch
@triton.jit
def _swiglu_backward(
    gate,
    up,
    dy,
    both,
    gate_stride,
    up_stride,
    dy_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < WIDTH
    gate_value = tl.load(gate + row * gate_stride + col, mask=live, other=0.0).to(tl.float32)
    up_value = tl.load(up + row * up_stride + col, mask=live, other=0.0).to(tl.float32)
    dy_value = tl.load(dy + row * dy_stride + col, mask=live, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate_value)
    silu = gate_value * sigmoid
    dgate = dy_value * up_value * (sigmoid + silu * (1.0 - sigmoid))
    out = both + row * (2 * WIDTH) + col
    tl.store(out, dgate.to(both.dtype.element_ty), mask=live)
    tl.store(out + WIDTH, (dy_value * silu).to(both.dtype.element_ty), mask=live)
