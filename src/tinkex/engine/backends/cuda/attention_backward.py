"""The backward pass of packed causal attention: gradients of queries, keys and values.

The attention weights are recomputed from the log-sum-exp of the forward pass. Keys and queries have
separate kernels: a program of one owns a block of keys and iterates over the queries that attend to
it, a program of the other owns a tile of queries and iterates over its keys. So no two programs add
to the same result, and a sequence's gradients have the same bits in every batch. That takes two
matrix products more than computing the weights once, which would need atomic adds.

Gradients of keys shared by several heads are summed over them in float32 and rounded once.

Nothing here waits for the device, and grids depend on shapes only, so calls can be captured.

Shapes: T tokens, H heads, G key/value heads, M = H/G, d head size, B sequences.
"""
# Triton has no useful types: a launch takes more than the kernel's own parameters.
# pyright: reportUnknownMemberType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tinkex.engine.backends.cuda.attention_backward_programs import (
    keys_program,
    queries_program,
    statistics_program,
)
from tinkex.engine.backends.cuda.paged_attention import Tiles
from tinkex.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """Launch parameters of both kernels: rows and keys of a step, warps, stages.

    A program of `keys` owns `block_n` keys, one of `queries` owns `block_m` rows.
    """

    keys: Tiles
    queries: Tiles


USUAL: Final = BackwardTiles(
    keys=Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2),
    queries=Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2),
)
# Two accumulators of 256 values per key leave few registers.
WIDE: Final = BackwardTiles(
    keys=Tiles(block_m=32, block_n=64, num_warps=8, num_stages=2),
    queries=Tiles(block_m=64, block_n=32, num_warps=4, num_stages=2),
)
# Without tensor cores the products live in registers: larger tiles would spill.
FLOAT32: Final = BackwardTiles(
    keys=Tiles(block_m=16, block_n=16, num_warps=8, num_stages=2),
    queries=Tiles(block_m=16, block_n=16, num_warps=8, num_stages=2),
)

_LOG2_E: Final = 1.4426950408889634
_STATISTICS_ROWS: Final = 32
# Tensor descriptors need rows at multiples of this many bytes.
_ALIGNMENT: Final = 16
# The most heads that share a tile, so that every tile holds a query of each.
_BUNDLE: Final = 16


def backward_tiles(dtype: torch.dtype, dim: int) -> BackwardTiles:
    """Tiles for a head size of `dim`."""
    if dtype == torch.float32:
        return FLOAT32
    return USUAL if dim <= 128 else WIDE


def packed_attention_backward(
    do_THd: Tensor,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    o_THd: Tensor,
    lse_HT: Tensor,
    cu: Tensor,
    max_len: int,
    *,
    scale: float | None = None,
    tiles: BackwardTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed_attention` by queries, keys and values, given that by its result.

    They are views of one buffer [T, H + 2G, d], so that the backward product with the joined
    projections needs no copy.

    `o_THd` and `lse_HT` (natural, float32) are its results, `cu`, `max_len` and `scale` its
    arguments. Rows may be strided; heads must be contiguous.
    """
    group = _check(do_THd, q_THd, k_TGd, v_TGd, o_THd, lse_HT)
    dim = q_THd.shape[2]
    tiles = tiles or backward_tiles(q_THd.dtype, dim)
    if min(tiles.keys.block_m, tiles.queries.block_m) < _BUNDLE:
        raise InputError(f"must have {_BUNDLE} rows or more", "tiles")
    inputs = _Inputs(
        *map(_aligned, (do_THd, q_THd, k_TGd, v_TGd)),
        cu=cu,
        max_len=max_len,
        scale=float(dim**-0.5 if scale is None else scale),
        bundle=min(group & -group, _BUNDLE),
    )
    stats = _statistics(inputs, o_THd, lse_HT)
    tokens, heads, dim = q_THd.shape
    kv_heads = k_TGd.shape[1]
    joined = q_THd.new_empty((tokens, heads + 2 * kv_heads, dim))
    dq_THd, dk_TGd, dv_TGd = joined.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    _queries(inputs, stats, tiles.queries, dq_THd)
    _keys(inputs, stats, tiles.keys, dk_TGd, dv_TGd)
    return dq_THd, dk_TGd, dv_TGd


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of both kernels. The heads of a bundle, C in the kernels, share tiles."""

    do_THd: Tensor
    q_THd: Tensor
    k_TGd: Tensor
    v_TGd: Tensor
    cu: Tensor
    max_len: int
    scale: float
    bundle: int

    @property
    def bundles(self) -> int:
        return self.q_THd.shape[1] // self.bundle

    @property
    def block_d(self) -> int:
        return max(16, 1 << (self.q_THd.shape[2] - 1).bit_length())

    @property
    def odd_copy(self) -> int:
        """The distance in rows between the two copies of the statistics: odd, and no less."""
        return self.q_THd.shape[0] * self.q_THd.shape[1] | 1

    def numbers(self) -> tuple[Any, ...]:
        return (self.cu, self.scale, self.scale * _LOG2_E, self.q_THd.shape[0])

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        return {
            "HEADS": self.bundle,
            "BUNDLES": self.bundles // self.k_TGd.shape[1],
            "DIM": self.q_THd.shape[2],
            "BLOCK_D": self.block_d,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def _statistics(inputs: _Inputs, o_THd: Tensor, lse_HT: Tensor) -> Tensor:
    """Two values of every row, once or twice: log-sum-exp to base 2, and sum(do * o)."""
    tokens = lse_HT.shape[1]
    rows = lse_HT.numel() + (inputs.odd_copy if inputs.bundle == 1 else 0)
    stats = torch.empty(rows * 2, dtype=torch.float32, device=lse_HT.device)
    grid = (-(-tokens * inputs.bundle // _STATISTICS_ROWS), inputs.bundles)
    statistics_program[grid](
        *(inputs.do_THd, o_THd, lse_HT, stats, tokens, inputs.odd_copy),
        *(*_strides(inputs.do_THd, o_THd), lse_HT.stride(0)),
        HEADS=inputs.bundle,
        DIM=o_THd.shape[2],
        BLOCK_D=inputs.block_d,
        BLOCK_M=_STATISTICS_ROWS,
        num_warps=4,
    )
    return stats


def _keys(inputs: _Inputs, stats: Tensor, tiles: Tiles, dk_TGd: Tensor, dv_TGd: Tensor) -> None:
    k_TGd, v_TGd = inputs.k_TGd, inputs.v_TGd
    box = [tiles.block_m // inputs.bundle, inputs.bundle, inputs.block_d]
    grid = (-(-inputs.max_len // tiles.block_n), k_TGd.shape[1], inputs.cu.shape[0] - 1)
    keys_program[grid](
        *(_descriptor(inputs.q_THd, box), _descriptor(inputs.do_THd, box)),
        _descriptor(stats, [2 * tiles.block_m]),
        *(k_TGd, v_TGd, dk_TGd, dv_TGd, *inputs.numbers(), inputs.odd_copy),
        *_strides(k_TGd, v_TGd, dk_TGd, dv_TGd),
        **inputs.constants(tiles),
    )


def _queries(inputs: _Inputs, stats: Tensor, tiles: Tiles, dq_THd: Tensor) -> None:
    q_THd, do_THd = inputs.q_THd, inputs.do_THd
    box = [tiles.block_n, 1, inputs.block_d]
    row_tiles = -(-inputs.max_len // (tiles.block_m // inputs.bundle))
    queries_program[(row_tiles, inputs.bundles, inputs.cu.shape[0] - 1)](
        *(_descriptor(inputs.k_TGd, box), _descriptor(inputs.v_TGd, box)),
        *(q_THd, do_THd, stats, dq_THd, *inputs.numbers()),
        *_strides(q_THd, do_THd, dq_THd),
        **inputs.constants(tiles),
    )


def _aligned(x_TXd: Tensor) -> Tensor:
    """The tensor itself if a descriptor supports its layout, else a copy."""
    tokens, heads, dim = x_TXd.shape
    size = x_TXd.element_size()
    places = (x_TXd.data_ptr(), *(n * size for n in (*x_TXd.stride()[:2], dim)))
    if all(place > 0 and place % _ALIGNMENT == 0 for place in places):
        return x_TXd
    # Zeros, because the padding of a row may be loaded with it.
    width = -(-dim * size // _ALIGNMENT) * _ALIGNMENT // size
    return x_TXd.new_zeros((tokens, heads, width))[:, :, :dim].copy_(x_TXd)


def _descriptor(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box)


def _strides(*tensors: Tensor) -> tuple[Any, ...]:
    """The token and head strides of each tensor."""
    return tuple(tensor.stride(i) for tensor in tensors for i in (0, 1))


def _check(
    do_THd: Tensor, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, o_THd: Tensor, lse_HT: Tensor
) -> int:
    """M, the number of heads that share a key head."""
    heads, dim = q_THd.shape[1:]
    kv_heads = k_TGd.shape[1]
    if heads % kv_heads:
        raise InputError(f"{heads} heads cannot share {kv_heads} key heads", "q_THd")
    if dim > 256:
        raise InputError(f"heads of {dim} numbers; at most 256 are supported", "q_THd")
    vectors = {"do_THd": do_THd, "q_THd": q_THd, "k_TGd": k_TGd, "v_TGd": v_TGd, "o_THd": o_THd}
    for name, tensor in vectors.items():
        if tensor.stride(2) != 1:
            raise InputError("heads must be contiguous", name)
        like = k_TGd if name in ("k_TGd", "v_TGd") else q_THd
        if tensor.shape != like.shape:
            raise InputError(f"is {list(tensor.shape)}, not {list(like.shape)}", name)
    if lse_HT.shape != (heads, q_THd.shape[0]) or lse_HT.stride(1) != 1:
        raise InputError("must hold one value per head and token", "lse_HT")
    return heads // kv_heads
