"""Causal attention over a paged cache or over packed keys, one kernel for both.

A program takes one key/value head and a tile of rows, queries times the heads that share the key
head, so that keys are read once for all of them. It iterates over the keys in blocks from key 0
upwards with an online softmax in float32. A masked key adds exactly 0, and the iteration depends on
key indices only: a row's bits are the same alone or in a batch, in decode or in prefill, paged or
packed, as long as `Tiles` (strict mode uses `strict_tiles`) and `split_keys` are the same.

Few long sequences leave most of the device idle; `split_keys` then splits every sequence into parts
of that many keys, which a second kernel joins in order.

Nothing here waits for the device, and grids depend on shapes only, so calls can be captured.

Shapes: T query tokens, S cache slots, B sequences, W blocks of a table row, H heads, G key/value
heads, M = H/G, d head size, P parts of a split sequence.
"""
# Triton has no useful types: a launch takes more than the kernel's own parameters.
# pyright: reportUnknownMemberType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from tinkex.engine.backends.cuda.attention_programs import attention_program, join_program
from tinkex.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters: rows and keys of a tile, warps, and pipeline stages.

    All but `num_stages` can change the last bits of a result.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


STRICT: Final = Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3)
# Decoding is bound by memory: many sequences fill the device with small programs, few need more
# loads in flight per program.
DECODE_FEW: Final = Tiles(block_m=16, block_n=64, num_warps=4, num_stages=2)
DECODE_MANY: Final = Tiles(block_m=16, block_n=32, num_warps=1, num_stages=2)
PREFILL: Final = Tiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
# Without tensor cores the products live in registers: larger tiles would spill.
FLOAT32: Final = Tiles(block_m=16, block_n=64, num_warps=8, num_stages=2)

_LOG2_E: Final = 1.4426950408889634
# A program may hold 227 KiB of shared memory on Hopper; queries and staging need some of it.
_KEY_BYTES: Final = 160 * 1024
_JOIN_PARTS: Final = 16
_MANY_PROGRAMS: Final = 512


def strict_tiles(dtype: torch.dtype, group: int) -> Tiles:
    """The tiles of strict mode, the same for every pass; M = `group`."""
    return _with_group(group, FLOAT32 if dtype == torch.float32 else STRICT)


def default_tiles(dtype: torch.dtype, group: int, max_q: int, programs: int = 0) -> Tiles:
    """Tiles for passes with at most `max_q` queries per sequence; M = `group`.

    `programs` counts key/value heads of all sequences.
    """
    if dtype == torch.float32:
        return _with_group(group, FLOAT32)
    if max_q > 1 and max_q * group > DECODE_FEW.block_m:
        return _with_group(group, PREFILL)
    return _with_group(group, DECODE_MANY if programs >= _MANY_PROGRAMS else DECODE_FEW)


def paged_attention(
    q_THd: Tensor,
    keys_SGd: Tensor,
    values_SGd: Tensor,
    *,
    cu_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_q: int,
    out: Tensor | None = None,
    scale: float | None = None,
    tiles: Tiles | None = None,
    split_keys: int | None = None,
) -> Tensor:
    """Attention [T, H, d] of queries that are the last tokens of contexts in a paged cache.

    The queries of sequence b are rows cu_q[b] to cu_q[b + 1], at most `max_q` of them. Its
    context, these tokens included, has context_lens[b] tokens; the key at position p is in
    slot block_tables[b, p // block_size] * block_size + p % block_size. A context of 0 tokens
    gives zeros, which is how to pad a captured batch. `cu_q`, `context_lens` and
    `block_tables` [B, W] are int32. Slots beyond a context are never read.

    `split_keys`, a multiple of the tiles' `block_n`, costs float32 scratch of P times the
    output, P = ceil(W * block_size / split_keys). A table wider than needed changes no bits.
    """
    group = _group(q_THd, keys_SGd, values_SGd)
    programs = context_lens.shape[0] * keys_SGd.shape[1]
    tiles = tiles or default_tiles(q_THd.dtype, group, max_q, programs)
    _check(tiles, group, block_size, split_keys)
    out_THd = torch.empty_like(q_THd) if out is None else out
    parts = -(-block_tables.shape[1] * block_size // split_keys) if split_keys else 1
    scratch = _scratch(parts, q_THd) if split_keys else None
    _launch(
        q_THd,
        keys_SGd,
        values_SGd,
        out_THd,
        cu_q,
        tiles,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
        max_q=max_q,
        scale=scale,
        split_keys=split_keys or 0,
        scratch=scratch,
    )
    if scratch is not None:
        _join(scratch, out_THd, cu_q, context_lens, max_q, split_keys or 0)
    return out_THd


def packed_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cu: Tensor,
    max_len: int,
    *,
    out: Tensor | None = None,
    scale: float | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention [T, H, d] within sequences laid end to end, and its log-sum-exp [H, T].

    Sequence b is rows cu[b] to cu[b + 1] (int32) of all three, at most `max_len` of them.
    The log-sum-exp is natural and in float32.
    """
    group = _group(q_THd, k_TGd, v_TGd)
    tiles = tiles or default_tiles(q_THd.dtype, group, max_len)
    _check(tiles, group, 1, None)
    out_THd = torch.empty_like(q_THd) if out is None else out
    tokens, heads = q_THd.shape[:2]
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=q_THd.device)
    _launch(
        q_THd, k_TGd, v_TGd, out_THd, cu, tiles, max_q=max_len, scale=scale, lse_HT=lse_HT
    )  # fmt: skip
    return out_THd, lse_HT


@dataclass(frozen=True, slots=True)
class _Scratch:
    """The results of the parts before the join: weighted values, maxima, sums."""

    acc_PTHd: Tensor
    max_PTH: Tensor
    sum_PTH: Tensor


def _launch(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    out_THd: Tensor,
    cu: Tensor,
    tiles: Tiles,
    *,
    max_q: int,
    scale: float | None,
    context_lens: Tensor | None = None,
    block_tables: Tensor | None = None,
    block_size: int = 0,
    lse_HT: Tensor | None = None,
    split_keys: int = 0,
    scratch: _Scratch | None = None,
) -> None:
    tokens, heads, dim = q_THd.shape
    kv_heads = k_SGd.shape[1]
    group = heads // kv_heads
    parts = scratch.acc_PTHd.shape[0] if scratch else 1
    row_tiles = -(-max_q // (tiles.block_m // group))
    attention_program[(row_tiles * parts, kv_heads, cu.shape[0] - 1)](
        q_THd,
        k_SGd,
        v_SGd,
        out_THd,
        lse_HT,
        scratch and scratch.acc_PTHd,
        scratch and scratch.max_PTH,
        scratch and scratch.sum_PTH,
        cu,
        context_lens,
        block_tables,
        (dim**-0.5 if scale is None else scale) * _LOG2_E,
        tokens,
        q_THd.stride(0),
        q_THd.stride(1),
        k_SGd.stride(0),
        k_SGd.stride(1),
        v_SGd.stride(0),
        v_SGd.stride(1),
        out_THd.stride(0),
        out_THd.stride(1),
        0 if block_tables is None else block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        BLOCK_D=_power_of_2(dim),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_SIZE=block_size,
        SPLIT=split_keys,
        PARTS=parts,
        num_warps=tiles.num_warps,
        num_stages=_stages(tiles, _power_of_2(dim) * k_SGd.element_size()),
    )


def _join(
    scratch: _Scratch,
    out_THd: Tensor,
    cu_q: Tensor,
    context_lens: Tensor,
    max_q: int,
    split_keys: int,
) -> None:
    tokens, heads, dim = out_THd.shape
    join_program[(max_q, heads, context_lens.shape[0])](
        scratch.acc_PTHd,
        scratch.max_PTH,
        scratch.sum_PTH,
        out_THd,
        cu_q,
        context_lens,
        tokens * heads,
        out_THd.stride(0),
        out_THd.stride(1),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=_power_of_2(dim),
        SPLIT=split_keys,
        BLOCK_P=_JOIN_PARTS,
        ROUNDS=-(-scratch.acc_PTHd.shape[0] // _JOIN_PARTS),
        num_warps=4,
    )


def _scratch(parts: int, q_THd: Tensor) -> _Scratch:
    shape, device = (parts, *q_THd.shape), q_THd.device
    acc_PTHd = torch.empty(shape, dtype=torch.float32, device=device)
    max_PTH = torch.empty(shape[:3], dtype=torch.float32, device=device)
    return _Scratch(acc_PTHd, max_PTH, torch.empty_like(max_PTH))


def _group(q_THd: Tensor, keys_SGd: Tensor, values_SGd: Tensor) -> int:
    heads, dim = q_THd.shape[1:]
    kv_heads = keys_SGd.shape[1]
    if heads % kv_heads:
        raise InputError(f"{heads} heads cannot share {kv_heads} key heads", "q_THd")
    if dim > 256:
        raise InputError(f"heads of {dim} numbers; at most 256 are supported", "q_THd")
    if not all(x.stride(2) == 1 for x in (q_THd, keys_SGd, values_SGd)):
        raise InputError("heads must be contiguous", "q_THd")
    return heads // kv_heads


def _check(tiles: Tiles, group: int, block_size: int, split_keys: int | None) -> None:
    if tiles.block_m < group:
        raise InputError(f"is less than the {group} heads that share a key head", "tiles.block_m")
    if block_size < 1:
        raise InputError("must be at least 1", "block_size")
    if split_keys is not None and (split_keys < 1 or split_keys % tiles.block_n):
        raise InputError(f"must be a multiple of {tiles.block_n}", "split_keys")


def _with_group(group: int, tiles: Tiles) -> Tiles:
    """The tiles, with room for one query of all heads that share a key head."""
    return replace(tiles, block_m=max(tiles.block_m, _power_of_2(group)))


def _power_of_2(n: int) -> int:
    """The next power of two, at least 16 for the tensor cores."""
    return max(16, 1 << (n - 1).bit_length())


def _stages(tiles: Tiles, row_bytes: int) -> int:
    """Pipeline stages, limited by the shared memory for their keys and values."""
    return max(1, min(tiles.num_stages, _KEY_BYTES // (2 * tiles.block_n * row_bytes)))
