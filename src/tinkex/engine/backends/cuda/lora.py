"""Low-rank corrections of many adapters in one pass: shrink to the rank, expand to the output.

Adapters are anywhere in device memory; tables of int64 addresses [S, P] point to each slot's
matrices, for the P projections that share an input. A is row-major [rank, I], B row-major
[O, rank], both contiguous. A slot of -1 (the base model alone), an address of 0 (a projection that
is not adapted) and a tile of no rows are skipped.

Rows come in tiles: consecutive rows, at most `block_rows`, of one slot. A row's bits depend on its
own values and the keyword arguments only, not on its tile. Sums are in float32 and in a fixed
order, without atomics.

The sum over I is split into N parts, so that a few tiles still fill the device; `expand_add_` adds
them up. Both calls can be captured: grids depend on shapes only.

Shapes: T rows, I inputs, Y width of the joined output, S slots, P projections, R largest rank,
N parts of the sum over I, K tiles.
"""
# Triton has no useful types: what a kernel does with its arguments is opaque to the checker, and
# a launch takes more than the kernel's own parameters.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from tinkex.engine.backends.cuda.launcher import fast_launch
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Rows by slot: per tile its slot, first row and number of rows (int32)."""

    slots_K: Tensor
    rows_K: Tensor
    counts_K: Tensor


def default_splits(inputs: int) -> int:
    """The number of parts of the sum over I; a function of the shape only."""
    # Every expanding program reads all parts, so only wide inputs get eight.
    return max(1, min(4, inputs // 512), min(8, inputs // 1024))


def shrink(
    x_TI: Tensor,
    a_addresses_SP: Tensor,
    ranks_S: Tensor,
    tiles: RowTiles,
    *,
    max_rank: int,
    dtype: torch.dtype | None = None,
    splits: int | None = None,
    block_rows: int = _BLOCK_ROWS,
    block_i: int = 128,
) -> Tensor:
    """Parts z [N, T, P, R] in float32 of each row times A transposed, for `expand_add_`.

    Values beyond a slot's rank, and skipped rows and projections, are not written.
    `dtype` is that of the adapters, by default that of `x_TI`; other adapters are converted to
    the type of `x_TI`.
    """
    if x_TI.stride(1) != 1:
        raise InputError("rows must be contiguous", "x_TI")
    tokens, inputs = x_TI.shape
    projections = a_addresses_SP.shape[1]
    splits = splits or default_splits(inputs)
    block_r = _rank_block(max_rank)
    shape = (splits, tokens, projections, max_rank)
    z_NTPR = torch.empty(shape, dtype=torch.float32, device=x_TI.device)
    rank_blocks = -(-max_rank // block_r)
    grid = (tiles.slots_K.shape[0], projections * rank_blocks, splits)
    _shrink_kernel[grid](
        x_TI,
        z_NTPR,
        a_addresses_SP,
        ranks_S,
        tiles.slots_K,
        tiles.rows_K,
        tiles.counts_K,
        x_TI.stride(0),
        tokens,
        INPUTS=inputs,
        PART=-(-inputs // (splits * block_i)) * block_i,
        PROJECTIONS=projections,
        RANK=max_rank,
        BLOCK_T=block_rows,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        WEIGHT=_triton_type(dtype or x_TI.dtype),
        num_warps=4,
        num_stages=3,
    )
    return z_NTPR


def expand_add_(
    y_TY: Tensor,
    z_NTPR: Tensor,
    b_addresses_SP: Tensor,
    ranks_S: Tensor,
    scales_S: Tensor,
    tiles: RowTiles,
    *,
    sizes: Sequence[int],
    offsets: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    block_rows: int = _BLOCK_ROWS,
    block_o: int = 128,
) -> None:
    """Add scale * z times B transposed to the P projections' columns of y, in place.

    Projection p has `sizes[p]` columns from `offsets[p]` on, by default without gaps. The sum of
    z is rounded to the adapters' `dtype`, by default that of y; the product is kept in float32
    and rounded once, with y.
    """
    splits, tokens, projections, max_rank = z_NTPR.shape
    starts = tuple(offsets) if offsets is not None else (0, *accumulate(sizes))[:-1]
    if not len(sizes) == len(starts) == projections == b_addresses_SP.shape[1]:
        raise InputError(f"{projections} projections need as many sizes and offsets", "sizes")
    if y_TY.stride(1) != 1:
        raise InputError("rows must be contiguous", "y_TY")
    grid = (tiles.slots_K.shape[0], sum(-(-size // block_o) for size in sizes))
    _expand_kernel[grid](
        y_TY,
        z_NTPR,
        b_addresses_SP,
        ranks_S,
        scales_S,
        tiles.slots_K,
        tiles.rows_K,
        tiles.counts_K,
        y_TY.stride(0),
        tokens,
        SIZES=tuple(sizes),
        OFFSETS=starts,
        SPLITS=splits,
        PROJECTIONS=projections,
        RANK=max_rank,
        BLOCK_T=block_rows,
        BLOCK_R=_rank_block(max_rank),
        BLOCK_O=block_o,
        WEIGHT=_triton_type(dtype or y_TY.dtype),
        num_warps=4,
        num_stages=1,
    )


def _rank_block(max_rank: int) -> int:
    """At least 16 for the tensor cores; beyond 64 a program would need too many registers."""
    return min(64, max(16, 1 << (max_rank - 1).bit_length()))


def _triton_type(dtype: torch.dtype) -> Any:
    types = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }
    if dtype not in types:
        raise InputError(f"adapters of type {dtype} are not supported", "dtype")
    return types[dtype]


@triton.jit
def _shrink_part(
    x_ptrs,
    a_ptrs,
    row_mask,
    rank_mask,
    first,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The sum over one part of the inputs. ALIGNED: rows of A begin at multiples of 16 bytes."""
    columns = tl.arange(0, BLOCK_I)
    acc = tl.zeros([x_ptrs.shape[0], a_ptrs.shape[0]], tl.float32)
    for step in range(0, PART, BLOCK_I):
        at = first + step
        there = (at + columns < INPUTS)[None, :]
        a_at = a_ptrs + (at + columns)[None, :]
        if ALIGNED:
            a_at = tl.multiple_of(a_at, (1, 16))
        x = tl.load(x_ptrs + (at + columns)[None, :], mask=row_mask[:, None] & there, other=0.0)
        a = tl.load(a_at, mask=rank_mask[:, None] & there, other=0.0)
        acc = tl.dot(x, tl.trans(a.to(x.dtype)), acc, input_precision="ieee")
    return acc


@fast_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr,
    z_ptr,
    address_ptr,
    rank_ptr,
    tile_slot_ptr,
    tile_row_ptr,
    tile_count_ptr,
    x_stride,
    num_tokens,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """One tile, one projection and BLOCK_R of its ranks, one part of the inputs."""
    tile = tl.program_id(0)
    projection = tl.program_id(1) % PROJECTIONS
    first_rank = tl.program_id(1) // PROJECTIONS * BLOCK_R
    part = tl.program_id(2)
    slot = tl.load(tile_slot_ptr + tile)
    count = tl.load(tile_count_ptr + tile)
    if (slot < 0) | (count <= 0):
        return
    rank = tl.load(rank_ptr + slot)
    address = tl.load(address_ptr + slot * PROJECTIONS + projection)
    if (address == 0) | (first_rank >= rank):
        return
    rows = tl.arange(0, BLOCK_T)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    token = (tl.load(tile_row_ptr + tile) + rows).to(tl.int64)
    row_mask = rows < count
    rank_mask = ranks < rank
    x_ptrs = x_ptr + token[:, None] * x_stride
    a_ptrs = address.to(tl.pointer_type(WEIGHT)) + ranks[:, None] * INPUTS
    first = part * PART
    # Vectorised loads need rows that begin at multiples of 16 bytes; the sum is the same either
    # way.
    if (INPUTS % 8 == 0) & (address % 16 == 0):
        acc = _shrink_part(
            x_ptrs, a_ptrs, row_mask, rank_mask, first, INPUTS, PART, BLOCK_I, ALIGNED=True
        )
    else:
        acc = _shrink_part(
            x_ptrs, a_ptrs, row_mask, rank_mask, first, INPUTS, PART, BLOCK_I, ALIGNED=False
        )
    z_row = (part.to(tl.int64) * num_tokens + token) * PROJECTIONS + projection
    z_ptrs = z_ptr + z_row[:, None] * RANK + ranks[None, :]
    tl.store(z_ptrs, acc, mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit
def _columns_of(block, SIZES: tl.constexpr, OFFSETS: tl.constexpr, BLOCK_O: tl.constexpr):
    """The projection that a block of outputs belongs to, its first output, offset and size."""
    projection, first, offset, size = 0, block * BLOCK_O, OFFSETS[0], SIZES[0]
    blocks_before = 0
    for p in tl.static_range(1, len(SIZES)):
        blocks_before += (SIZES[p - 1] + BLOCK_O - 1) // BLOCK_O
        beyond = block >= blocks_before
        projection = tl.where(beyond, p, projection)
        first = tl.where(beyond, (block - blocks_before) * BLOCK_O, first)
        offset = tl.where(beyond, OFFSETS[p], offset)
        size = tl.where(beyond, SIZES[p], size)
    return projection, first, offset, size


@triton.jit
def _expand_part(
    acc,
    z_ptrs,
    b_ptrs,
    row_mask,
    output_mask,
    first_rank,
    rank,
    part_stride,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add BLOCK_R ranks' share. ALIGNED: rows of B begin at multiples of 16 bytes."""
    ranks = first_rank + tl.arange(0, BLOCK_R)
    b_at = b_ptrs + ranks[None, :]
    if ALIGNED:
        # The rank is a multiple of 8 here; this expression makes that known to the compiler.
        rank = rank // 8 * 8
        b_at = tl.multiple_of(b_at, (1, 16))
    b = tl.load(b_at, mask=output_mask[:, None] & (ranks < rank)[None, :], other=0.0)
    z_mask = row_mask[:, None] & (ranks < rank)[None, :]
    z = tl.load(z_ptrs + ranks[None, :], mask=z_mask, other=0.0)
    for n in tl.static_range(1, SPLITS):
        z += tl.load(z_ptrs + n * part_stride + ranks[None, :], mask=z_mask, other=0.0)
    return tl.dot(z.to(b.dtype), tl.trans(b), acc, input_precision="ieee")


@fast_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    y_ptr,
    z_ptr,
    address_ptr,
    rank_ptr,
    scale_ptr,
    tile_slot_ptr,
    tile_row_ptr,
    tile_count_ptr,
    y_stride,
    num_tokens,
    SIZES: tl.constexpr,
    OFFSETS: tl.constexpr,
    SPLITS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """One tile and BLOCK_O outputs of one projection."""
    tile = tl.program_id(0)
    projection, first, offset, size = _columns_of(tl.program_id(1), SIZES, OFFSETS, BLOCK_O)
    slot = tl.load(tile_slot_ptr + tile)
    count = tl.load(tile_count_ptr + tile)
    if (slot < 0) | (count <= 0):
        return
    rank = tl.load(rank_ptr + slot)
    address = tl.load(address_ptr + slot * PROJECTIONS + projection)
    if (address == 0) | (rank <= 0):
        return
    rows = tl.arange(0, BLOCK_T)
    outputs = first + tl.arange(0, BLOCK_O)
    token = (tl.load(tile_row_ptr + tile) + rows).to(tl.int64)
    row_mask = rows < count
    output_mask = outputs < size
    # Loaded before the product, so that the load overlaps with it.
    y_ptrs = y_ptr + token[:, None] * y_stride + (offset + outputs)[None, :]
    y_mask = row_mask[:, None] & output_mask[None, :]
    y = tl.load(y_ptrs, mask=y_mask, other=0.0)
    scale = tl.load(scale_ptr + slot)
    z_ptrs = z_ptr + (token * PROJECTIONS + projection)[:, None] * RANK
    part_stride = num_tokens.to(tl.int64) * PROJECTIONS * RANK
    b_ptrs = address.to(tl.pointer_type(WEIGHT)) + outputs.to(tl.int64)[:, None] * rank
    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    if (rank % 8 == 0) & (address % 16 == 0):
        for first_rank in range(0, rank, BLOCK_R):
            acc = _expand_part(
                acc, z_ptrs, b_ptrs, row_mask, output_mask, first_rank, rank,
                part_stride, SPLITS, BLOCK_R, ALIGNED=True,
            )  # fmt: skip
    else:
        for first_rank in range(0, rank, BLOCK_R):
            acc = _expand_part(
                acc, z_ptrs, b_ptrs, row_mask, output_mask, first_rank, rank,
                part_stride, SPLITS, BLOCK_R, ALIGNED=False,
            )  # fmt: skip
    y = tl.fma(acc, tl.full(acc.shape, scale, tl.float32), y.to(tl.float32))
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=y_mask)
