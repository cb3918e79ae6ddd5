"""Attention on a CUDA device: one kernel for training and for sampling.

Both read keys in the same order and the same tiles, so a token's output has the same bits in
a training pass, in a prompt and while decoding. The backward pass adds up in a fixed order too.

Shapes: T tokens, H heads, G key/value heads, d head size, X = H*d, B spans, W blocks per span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine.kernels import paged_attention as kernels
from tinkex.engine.kernels.attention_backward import packed_attention_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.attention.paged import Span


class CudaPackedAttention:
    """Causal attention within each sequence of a pack; an `Attend` without a cache."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        self._cu = _tensor(ends, device)
        self._longest = max(lengths)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        del layer
        return _apply(q_THd, k_TGd, v_TGd, self._cu, self._longest).flatten(1)


def _apply(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu: Tensor, longest: int) -> Tensor:
    return _Packed.apply(q_THd, k_TGd, v_TGd, cu, longest)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportReturnType] -- torch's own stub


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu: Tensor, longest: int
    ) -> Tensor:
        # Strict tiles are also the fastest for whole sequences.
        chosen = tiles(q_THd, k_TGd, longest, strict=True)
        o_THd, lse_HT = kernels.packed_attention(q_THd, k_TGd, v_TGd, cu, longest, tiles=chosen)
        ctx.longest = longest
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, cu, o_THd, lse_HT)
        return o_THd

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGd, cu, o_THd, lse_HT = ctx.saved_tensors
        found = packed_attention_backward(
            *(slopes[0].contiguous(), q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu, ctx.longest)
        )
        return (*found, None, None)


class CudaPagedAttention:
    """`Attend` for one pass: writes the new keys and values, then reads them all."""

    def __init__(
        self, cache: Tensor, spans: Sequence[Span], *, block_size: int, strict: bool
    ) -> None:
        device = cache.device
        self._cache = cache
        self._block_size = block_size
        self._strict = strict
        width = max(len(span.blocks) for span in spans)
        tables = np.zeros((len(spans), width), np.int32)
        for row, span in zip(tables, spans, strict=True):
            row[: len(span.blocks)] = span.blocks
        self._slots_T = _tensor(_written(spans, tables, block_size), device)
        self._cu_q = _tensor(np.cumsum([0, *map(len, spans)], dtype=np.int32), device)
        self._contexts = _tensor(np.array([span.stop for span in spans], np.int32), device)
        self._tables = _tensor(tables, device)
        self._longest = max(map(len, spans))

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys_SGd, values_SGd = self._cache[0, layer], self._cache[1, layer]
        keys_SGd.index_copy_(0, self._slots_T, k_TGd)
        values_SGd.index_copy_(0, self._slots_T, v_TGd)
        o_THd = kernels.paged_attention(
            q_THd,
            keys_SGd,
            values_SGd,
            cu_q=self._cu_q,
            context_lens=self._contexts,
            block_tables=self._tables,
            block_size=self._block_size,
            max_q=self._longest,
            tiles=tiles(q_THd, keys_SGd, self._longest, strict=self._strict),
        )
        return o_THd.flatten(1)


def tiles(q_THd: Tensor, k_SGd: Tensor, longest: int, *, strict: bool) -> kernels.Tiles:
    """How to cut the work: always alike when strict, otherwise as is fastest."""
    group = q_THd.shape[1] // k_SGd.shape[1]
    if strict:
        return kernels.strict_tiles(q_THd.dtype, group)
    return kernels.default_tiles(q_THd.dtype, group, longest)


def _written(
    spans: Sequence[Span], tables: NDArray[np.int32], block_size: int
) -> NDArray[np.int64]:
    """The cache slots of the spans' own tokens."""
    slots: list[NDArray[np.int64]] = []
    for row, span in zip(tables, spans, strict=True):
        positions = np.arange(span.start, span.stop)
        blocks = row[positions // block_size].astype(np.int64)
        slots.append(blocks * block_size + positions % block_size)
    return np.concatenate(slots)


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
