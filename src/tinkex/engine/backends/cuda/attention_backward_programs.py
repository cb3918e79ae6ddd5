"""The kernels of `attention_backward`: row statistics, then keys and queries separately.

Shapes: a bundle is C heads that share a key head, C a power of two; a key head has R bundles.
Rows of a tile are queries times the heads of a bundle. Statistics are two float32 values per row,
[H/C, T*C, 2], so that those of a tile are contiguous. A load must not start at an odd row; where C
is 1 a tile may, so there a second copy follows, shifted by one row.

The loops load through tensor descriptors, which saves registers for the accumulators. A descriptor
does not end at a sequence's end, so the last step of a loop ends with the sequence, and the first
one starts at its beginning and masks the rows of the second. Only a sequence shorter than one step
loads rows of other sequences; these are set to zero, because 0 times NaN is NaN.
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

_LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens", "odd_copy"])
def statistics_program(
    do_ptr,
    o_ptr,
    lse_ptr,
    stats_ptr,
    num_tokens,
    odd_copy,
    do_stride_t,
    do_stride_h,
    o_stride_t,
    o_stride_h,
    lse_stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The statistics of every row: its log-sum-exp to base 2, and sum(do * o)."""
    bundle = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = rows // HEADS
    head = bundle * HEADS + rows % HEADS
    valid = token < num_tokens
    inside = valid[:, None] & (dims < DIM)[None, :]
    do_ptrs = do_ptr + (token * do_stride_t + head * do_stride_h)[:, None] + dims[None, :]
    o_ptrs = o_ptr + (token * o_stride_t + head * o_stride_h)[:, None] + dims[None, :]
    do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head * lse_stride_h + token, mask=valid, other=0.0)
    base2 = lse * _LOG2_E
    delta = tl.sum(do * o, 1)
    ptrs = stats_ptr + (bundle.to(tl.int64) * num_tokens * HEADS + rows) * 2
    tl.store(ptrs, base2, mask=valid)
    tl.store(ptrs + 1, delta, mask=valid)
    if HEADS == 1:
        tl.store(ptrs + odd_copy * 2, base2, mask=valid)
        tl.store(ptrs + odd_copy * 2 + 1, delta, mask=valid)


@triton.jit
def _add_rows(
    dk,
    dv,
    k,
    v,
    q_desc,
    do_desc,
    stats_desc,
    num_tokens,
    odd_copy,
    first_token,
    bundle,
    first_key,
    step,
    scale_2,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Add the gradients of a block of keys by the queries of one step; weights are [keys, rows]."""
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    start = tl.maximum(step, 0)
    end = step + QUERIES
    query = start + tl.arange(0, BLOCK_M) // HEADS
    place = (bundle * num_tokens + first_token + start) * HEADS
    if HEADS == 1:
        place += place % 2 * odd_copy
    q = q_desc.load([first_token + start, bundle * HEADS, 0]).reshape(BLOCK_M, BLOCK_D)
    if CLEARED:
        q = tl.where((query < end)[:, None], q, 0.0)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    do = do_desc.load([first_token + start, bundle * HEADS, 0]).reshape(BLOCK_M, BLOCK_D)
    if CLEARED:
        do = tl.where((query < end)[:, None], do, 0.0)
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    # Loaded here: waiting for the load earlier would delay the products.
    base2, delta = stats_desc.load([place * 2]).reshape(BLOCK_M, 2).split()
    if CLEARED:
        base2 = tl.where(query < end, base2, 0.0)
        delta = tl.where(query < end, delta, 0.0)
    exponent = scores * scale_2 - base2[None, :]
    if start < first_key + BLOCK_N:
        keys = first_key + tl.arange(0, BLOCK_N)
        seen = (keys[:, None] <= query[None, :]) & (query < end)[None, :]
        exponent = tl.where(seen, exponent, float("-inf"))
    p = tl.exp2(exponent)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _store_keys(ptr, x, first_token, length, stride_t, stride_g, DIM: tl.constexpr):
    """Store the block that this program owns, up to the end of the sequence."""
    offsets = tl.arange(0, x.shape[0])
    dims = tl.arange(0, x.shape[1])
    first_key = tl.program_id(0) * x.shape[0]
    first = (first_token + first_key).to(tl.int64)
    inside = (offsets < length - first_key)[:, None] & (dims < DIM)[None, :]
    ptr += first * stride_t + tl.program_id(1).to(tl.int64) * stride_g
    ptrs = ptr + (offsets[:, None] * stride_t + dims[None, :])
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "odd_copy"])
def keys_program(
    q_desc,
    do_desc,
    stats_desc,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    cu_ptr,
    scale,
    scale_2,
    num_tokens,
    odd_copy,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    dk_stride_t,
    dk_stride_g,
    dv_stride_t,
    dv_stride_g,
    HEADS: tl.constexpr,
    BUNDLES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients of one block of keys and values, summed over all heads that share them."""
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    # Most queries attend to the first keys; those blocks also start first.
    first_key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_ptr + sequence)
    length = tl.load(cu_ptr + sequence + 1) - first_token
    if first_key >= length:
        return
    first = (first_token + first_key).to(tl.int64)
    head = kv_head.to(tl.int64)
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = (first_key + offsets < length)[:, None] & (dims < DIM)[None, :]
    k_ptr += first * k_stride_t + head * k_stride_g
    v_ptr += first * v_stride_t + head * v_stride_g
    k = tl.load(k_ptr + (offsets[:, None] * k_stride_t + dims[None, :]), mask=inside, other=0.0)
    v = tl.load(v_ptr + (offsets[:, None] * v_stride_t + dims[None, :]), mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if length < QUERIES:
        for i in range(BUNDLES):
            dk, dv = _add_rows(
                dk, dv, k, v, q_desc, do_desc, stats_desc, num_tokens, odd_copy, first_token,
                kv_head * BUNDLES + i, first_key, length - QUERIES, scale_2,
                HEADS, BLOCK_D, BLOCK_M, BLOCK_N, CLEARED=True,
            )  # fmt: skip
    else:
        low = length - tl.cdiv(length - first_key, QUERIES) * QUERIES
        for i in range(BUNDLES):
            for step in range(low, length, QUERIES):
                dk, dv = _add_rows(
                    dk, dv, k, v, q_desc, do_desc, stats_desc, num_tokens, odd_copy,
                    first_token, kv_head * BUNDLES + i, first_key, step, scale_2,
                    HEADS, BLOCK_D, BLOCK_M, BLOCK_N, CLEARED=False,
                )  # fmt: skip
    _store_keys(dk_ptr, dk * scale, first_token, length, dk_stride_t, dk_stride_g, DIM)
    _store_keys(dv_ptr, dv, first_token, length, dv_stride_t, dv_stride_g, DIM)


@triton.jit
def _add_keys(
    dq,
    q,
    do,
    base2,
    delta,
    query,
    k_desc,
    v_desc,
    first_token,
    kv_head,
    first_query,
    step,
    scale_2,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Add the gradient that the keys of one step give a tile of queries."""
    start = tl.maximum(step, 0)
    end = step + BLOCK_N
    keys = start + tl.arange(0, BLOCK_N)
    k = k_desc.load([first_token + start, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
    if CLEARED:
        k = tl.where((keys < end)[:, None], k, 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    v = v_desc.load([first_token + start, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
    if CLEARED:
        v = tl.where((keys < end)[:, None], v, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    exponent = scores * scale_2 - base2[:, None]
    if (step < 0) | (end > first_query + 1):
        seen = (keys[None, :] <= query[:, None]) & (keys < end)[None, :]
        exponent = tl.where(seen, exponent, float("-inf"))
    ds = tl.exp2(exponent) * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def queries_program(
    k_desc,
    v_desc,
    q_ptr,
    do_ptr,
    stats_ptr,
    dq_ptr,
    cu_ptr,
    scale,
    scale_2,
    num_tokens,
    q_stride_t,
    q_stride_h,
    do_stride_t,
    do_stride_h,
    dq_stride_t,
    dq_stride_h,
    HEADS: tl.constexpr,
    BUNDLES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of one tile of queries."""
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    # The last tiles of a sequence have the most keys: they start first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    bundle = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = bundle // BUNDLES
    first_token = tl.load(cu_ptr + sequence)
    length = tl.load(cu_ptr + sequence + 1) - first_token
    if first_query >= length:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    query = first_query + rows // HEADS
    valid = query < length
    inside = valid[:, None] & (dims < DIM)[None, :]
    token = (first_token + query).to(tl.int64)
    head = bundle * HEADS + rows % HEADS
    q_rows = token * q_stride_t + head * q_stride_h
    do_rows = token * do_stride_t + head * do_stride_h
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    do = tl.load(do_ptr + do_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    place = (bundle.to(tl.int64) * num_tokens + first_token + first_query) * HEADS + rows
    base2 = tl.load(stats_ptr + place * 2, mask=valid, other=0.0)
    delta = tl.load(stats_ptr + place * 2 + 1, mask=valid, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(first_query + QUERIES, length)
    if end < BLOCK_N:
        dq = _add_keys(
            dq, q, do, base2, delta, query, k_desc, v_desc, first_token, kv_head, first_query,
            end - BLOCK_N, scale_2, BLOCK_D, BLOCK_N, CLEARED=True,
        )  # fmt: skip
    else:
        for step in range(end - tl.cdiv(end, BLOCK_N) * BLOCK_N, end, BLOCK_N):
            dq = _add_keys(
                dq, q, do, base2, delta, query, k_desc, v_desc, first_token, kv_head,
                first_query, step, scale_2, BLOCK_D, BLOCK_N, CLEARED=False,
            )  # fmt: skip
    dq_rows = token * dq_stride_t + head * dq_stride_h
    dq_ptrs = dq_ptr + dq_rows[:, None] + dims[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
