"""From logits to tokens on the device, without sorting and without waiting.

The semantics are those of `backends/torch/pick.py` for draws without top-k and top-p: the token at
a given quantile of the cumulative distribution in the order of ids. Tokens are the same except
where the quantile is within rounding of a boundary.

One pass over the logits computes a maximum and a sum per block of tokens; then one program per row
sums the blocks in float64, finds the block and reads only that one again. Rows do not influence
each other, and both launches can be captured.

Shapes: B rows, V vocabulary, N blocks of tokens.
"""
# Triton has no useful types: what a kernel does with its arguments is opaque to the checker, and
# a launch takes more than the kernel's own parameters.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from tinkex.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# float32 cannot represent the reciprocal of a lower temperature; such draws are greedy anyway.
_COLDEST: Final = tl.constexpr(1e-30)
_BLOCK: Final = 4096


def pick(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    uniforms_B: Tensor,
    *,
    block: int = _BLOCK,
    num_warps: int = 8,
) -> Tensor:
    """One token per row, [B] (int64).

    `logits_BV` is float32, `temperatures_B` float32 with 0 for the likeliest token (of equal
    ones the lowest id), `uniforms_B` float64 in [0, 1). A row that has no distribution, because
    of NaN or infinite logits, gets some token within range.
    """
    if temperatures_B.dtype != torch.float32:
        raise InputError("must be float32", "temperatures_B")
    if uniforms_B.dtype != torch.float64:
        raise InputError("must be float64", "uniforms_B")
    if logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        raise InputError("must be float32 with contiguous rows", "logits_BV")
    rows, vocabulary = logits_BV.shape
    device = logits_BV.device
    blocks = -(-vocabulary // block)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    maxima_BN, sums_BN = torch.empty((2, rows, blocks), dtype=torch.float32, device=device)
    best_BN = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    _blocks_kernel[(rows, blocks)](
        logits_BV,
        temperatures_B,
        maxima_BN,
        sums_BN,
        best_BN,
        logits_BV.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        num_warps=num_warps,
    )
    _rows_kernel[(rows,)](
        logits_BV,
        temperatures_B,
        uniforms_B,
        tokens_B,
        maxima_BN,
        sums_BN,
        best_BN,
        logits_BV.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=block,
        BLOCKS=blocks,
        BLOCKS_POWER=max(2, 1 << (blocks - 1).bit_length()),
        num_warps=num_warps,
    )
    return tokens_B


@triton.jit
def _shift_of(largest):
    """What to subtract before exponentials: nothing if all logits are minus infinity."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _sharpness(temperature_ptr, row):
    """One over the temperature."""
    return 1.0 / tl.maximum(tl.load(temperature_ptr + row), _COLDEST)


@triton.jit
def _blocks_kernel(
    logits_ptr,
    temperature_ptr,
    max_ptr,
    sum_ptr,
    best_ptr,
    row_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: its maximum, the first token that has it, and its sum.

    The sum is relative to the block's own maximum, so that no block underflows.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + ids,
        mask=ids < VOCABULARY,
        other=float("-inf"),
    )
    largest = tl.max(logits, 0)
    below = logits - _shift_of(largest)
    place = row * tl.num_programs(1) + block
    tl.store(max_ptr + place, largest)
    tl.store(best_ptr + place, tl.min(tl.where(logits == largest, ids, VOCABULARY - 1), 0))
    weights = tl.exp(below * _sharpness(temperature_ptr, row))
    tl.store(sum_ptr + place, tl.sum(weights, 0))


@triton.jit
def _draw(
    logits_ptr,
    sum_ptr,
    maxima,
    below,
    sharpness,
    uniform,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POWER: tl.constexpr,
    VOCABULARY: tl.constexpr,
):
    """The token at the quantile `uniform` of a row's cumulative distribution."""
    blocks = tl.arange(0, BLOCKS_POWER)
    factors = tl.exp(below * sharpness.to(tl.float64))
    sums = tl.load(sum_ptr + blocks, mask=blocks < BLOCKS, other=0.0)
    weights = sums.to(tl.float64) * factors
    target = uniform * tl.sum(weights, 0)
    # The first block whose sum exceeds the target, or, where rounding leaves none, the last one
    # that weighs anything. The same for the token within it. Sums made in parallel may grow by
    # a rounding error where the weight is 0: such a place is not taken.
    exceeds = (tl.cumsum(weights, 0) > target) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, blocks, 0), 0)
    block = tl.min(tl.where(exceeds, blocks, last), 0)
    before = tl.sum(tl.where(blocks < block, weights, 0.0), 0)
    factor = tl.sum(tl.where(blocks == block, factors, 0.0), 0)
    shift = _shift_of(tl.max(tl.where(blocks == block, maxima, float("-inf")), 0))
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + ids, mask=ids < VOCABULARY, other=float("-inf"))
    mass = tl.exp((logits - shift) * sharpness)
    exceeds = (tl.cumsum(mass.to(tl.float64), 0) > (target - before) / factor) & (mass > 0.0)
    last = tl.max(tl.where(mass > 0.0, ids, block * BLOCK), 0)
    return tl.min(tl.where(exceeds, ids, last), 0)


@triton.jit
def _rows_kernel(
    logits_ptr,
    temperature_ptr,
    uniform_ptr,
    token_ptr,
    max_ptr,
    sum_ptr,
    best_ptr,
    row_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POWER: tl.constexpr,
):
    """One row: its token, from the statistics of its blocks."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS_POWER)
    there = blocks < BLOCKS
    place = row * BLOCKS + blocks
    maxima = tl.load(max_ptr + place, mask=there, other=float("-inf"))
    largest = tl.max(maxima, 0)
    below = (maxima - _shift_of(largest)).to(tl.float64)
    best = tl.load(best_ptr + place, mask=there, other=VOCABULARY - 1)
    token = tl.min(tl.where(maxima == largest, best, VOCABULARY - 1), 0)
    if tl.load(temperature_ptr + row) > 0.0:
        sharpness = _sharpness(temperature_ptr, row)
        uniform = tl.load(uniform_ptr + row)
        logits_ptr += row.to(tl.int64) * row_stride
        sum_ptr += row * BLOCKS
        token = _draw(
            logits_ptr, sum_ptr, maxima, below, sharpness, uniform,
            BLOCK, BLOCKS, BLOCKS_POWER, VOCABULARY,
        )  # fmt: skip
    tl.store(token_ptr + row, token.to(tl.int64))
