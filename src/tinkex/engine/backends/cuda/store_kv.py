# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain columns for constants, which its signature denies.
"""Stores the keys and values of a pass in the KV cache, both in one launch.

Shapes: T tokens, S cache slots, G key/value heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tinkex.engine.backends.cuda.launcher import fast_launch

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 1024
"""Elements that one program copies."""


def store_kv(
    k_TGd: Tensor, v_TGd: Tensor, slots_T: Tensor, keys_SGd: Tensor, values_SGd: Tensor
) -> None:
    """`keys[slots] = k` and `values[slots] = v`; the slots must exist."""
    tokens, heads, dim = k_TGd.shape
    for x in (k_TGd, v_TGd, keys_SGd, values_SGd):
        assert x.stride()[1:] == (dim, 1), "the heads of a token must be contiguous"
    width = heads * dim
    block = min(triton.next_power_of_2(width), _ELEMENTS)
    _store_kv[tokens, triton.cdiv(width, block), 2](
        k_TGd,
        v_TGd,
        slots_T,
        keys_SGd,
        values_SGd,
        k_TGd.stride(0),
        v_TGd.stride(0),
        keys_SGd.stride(0),
        values_SGd.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )


@fast_launch
@triton.jit
def _store_kv(
    k_ptr,
    v_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    k_stride,
    v_stride,
    keys_stride,
    values_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if tl.program_id(2) == 0:
        x = tl.load(k_ptr + token * k_stride + columns, mask=inside)
        tl.store(keys_ptr + slot * keys_stride + columns, x, mask=inside)
    else:
        x = tl.load(v_ptr + token * v_stride + columns, mask=inside)
        tl.store(values_ptr + slot * values_stride + columns, x, mask=inside)
