"""The kernels of `paged_attention`: one tile's loop over its keys, and the join of parts.

Shapes: rows of a tile are queries times the M heads that share a key head.
"""
# Triton has no useful types: what a kernel does with its arguments is opaque to the checker.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from tinkex.engine.backends.cuda.launcher import fast_launch

_LN_2: Final = tl.constexpr(0.6931471805599453)


@triton.jit
def _fold(
    q,
    row_max,
    row_sum,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    first_slot,
    k_stride,
    v_stride,
    start,
    end,
    position,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax. Without MASKED every row attends to every key of the block.

    Multiply-adds are written as `fma`: whether the compiler fuses must not depend on MASKED,
    because the other rows of the tile decide which of the two variants processes a key.
    """
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if BLOCK_SIZE == 0:
        slots = first_slot + keys
    elif MASKED:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    k_ptrs = k_ptr + slots[:, None] * k_stride + dims[None, :]
    v_ptrs = v_ptr + slots[:, None] * v_stride + dims[None, :]
    # Slots beyond the context belong to others or were never written, and may hold NaN: 0 times
    # NaN is NaN, so they are not loaded.
    if MASKED:
        inside = (keys < end)[:, None] & (dims < DIM)[None, :]
        k = tl.load(k_ptrs, mask=inside, other=0.0)
        v = tl.load(v_ptrs, mask=inside, other=0.0)
    elif DIM != BLOCK_D:
        k = tl.load(k_ptrs, mask=(dims < DIM)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(dims < DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = (keys[None, :] <= position[:, None]) & (keys < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    # Rounding is monotonic, so this is the maximum of the scaled scores.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    shift = new_max
    if MASKED:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -shift[:, None]))
    keep = tl.exp2(row_max - shift)
    row_sum = tl.fma(row_sum, keep, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@fast_launch
@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def attention_program(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    cu_ptr,
    lens_ptr,
    table_ptr,
    scale,
    num_tokens,
    q_stride_t,
    q_stride_h,
    k_stride_s,
    k_stride_g,
    v_stride_s,
    v_stride_g,
    o_stride_t,
    o_stride_h,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of one key head; BLOCK_SIZE 0 means packed keys, SPLIT 0 all keys."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a sequence have the most keys: they start first.
    tile = tl.num_programs(0) // PARTS - 1 - tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_ptr + sequence)
    num_queries = tl.load(cu_ptr + sequence + 1) - first_row
    first_query = tile * QUERIES
    if first_query >= num_queries:
        return
    if BLOCK_SIZE == 0:
        context = num_queries
        first_slot = first_row.to(tl.int64)
        table_row = table_ptr
    else:
        context = tl.load(lens_ptr + sequence)
        first_slot = 0
        table_row = table_ptr + sequence.to(tl.int64) * table_stride
    before = context - num_queries
    end = before + tl.minimum(first_query + QUERIES, num_queries)
    low = part * SPLIT
    if SPLIT != 0:
        if low >= end:
            return
        end = tl.minimum(end, low + SPLIT)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    query = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (rows < QUERIES * GROUP) & (query < num_queries)
    position = before + query
    token = (first_row + query).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h + dims[None, :],
        mask=valid[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    k_ptr += kv_head.to(tl.int64) * k_stride_g
    v_ptr += kv_head.to(tl.int64) * v_stride_g
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Every row of the tile attends to the keys below `full`, a multiple of BLOCK_N.
    full = tl.maximum(before + first_query + 1, 0) // BLOCK_N * BLOCK_N
    full = tl.maximum(low, tl.minimum(full, end // BLOCK_N * BLOCK_N))
    for start in range(low, full, BLOCK_N):
        row_max, row_sum, acc = _fold(
            q, row_max, row_sum, acc, k_ptr, v_ptr, table_row, first_slot,
            k_stride_s, v_stride_s, start, end, position, scale,
            DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, MASKED=False,
        )  # fmt: skip
    for start in range(full, end, BLOCK_N):
        row_max, row_sum, acc = _fold(
            q, row_max, row_sum, acc, k_ptr, v_ptr, table_row, first_slot,
            k_stride_s, v_stride_s, start, end, position, scale,
            DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, MASKED=True,
        )  # fmt: skip

    inside = valid[:, None] & (dims < DIM)[None, :]
    if SPLIT == 0:
        o = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        o_ptrs = o_ptr + token[:, None] * o_stride_t + head[:, None] * o_stride_h + dims[None, :]
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=inside)
        if lse_ptr is not None:
            lse = (row_max + tl.log2(row_sum)) * _LN_2
            tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, lse, mask=valid)
    else:
        place = (part.to(tl.int64) * num_tokens + token) * HEADS + head
        tl.store(acc_ptr + place[:, None] * DIM + dims[None, :], acc, mask=inside)
        tl.store(max_ptr + place, row_max, mask=valid)
        tl.store(sum_ptr + place, row_sum, mask=valid)


@fast_launch
@triton.jit(do_not_specialize=["part_stride"])
def join_program(
    acc_ptr,
    max_ptr,
    sum_ptr,
    o_ptr,
    cu_ptr,
    lens_ptr,
    part_stride,
    o_stride_t,
    o_stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One row of one head: its parts joined in order, BLOCK_P at a time."""
    query = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_ptr + sequence)
    num_queries = tl.load(cu_ptr + sequence + 1) - first_row
    if query >= num_queries:
        return
    seen = tl.load(lens_ptr + sequence) - num_queries + query + 1
    # Parts beyond the context of this row were not written, or are empty.
    count = tl.maximum(seen + SPLIT - 1, 0) // SPLIT
    row = (first_row + query).to(tl.int64)
    place = row * HEADS + head
    dims = tl.arange(0, BLOCK_D)
    parts = tl.arange(0, BLOCK_P)
    row_max = float("-inf")
    for i in tl.static_range(ROUNDS):
        part = i * BLOCK_P + parts
        part_max = tl.load(
            max_ptr + part.to(tl.int64) * part_stride + place,
            mask=part < count,
            other=float("-inf"),
        )
        row_max = tl.maximum(row_max, tl.max(part_max, 0))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(ROUNDS):
        part = i * BLOCK_P + parts
        at = part.to(tl.int64) * part_stride + place
        there = part < count
        weight = tl.exp2(tl.load(max_ptr + at, mask=there, other=float("-inf")) - shift)
        row_sum += tl.sum(weight * tl.load(sum_ptr + at, mask=there, other=0.0), 0)
        part_acc = tl.load(
            acc_ptr + at[:, None] * DIM + dims[None, :],
            mask=there[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * part_acc, 0)
    o = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    o_ptrs = o_ptr + row * o_stride_t + head * o_stride_h + dims
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=dims < DIM)
