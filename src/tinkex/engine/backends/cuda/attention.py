"""Attention on a CUDA device: one kernel for training and for sampling.

Both read keys in the same order and the same tiles, so a token's output has the same bits in
a training pass, in prefill and in decoding. The backward pass sums in a fixed order, too.

Shapes: T tokens, H heads, G key/value heads, d head size, X = H*d, B spans, W blocks per span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine.backends.cuda import paged_attention as kernels
from tinkex.engine.backends.cuda.attention_backward import packed_attention_backward
from tinkex.engine.backends.cuda.store_kv import store_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.attention.paged import TokenSpan


class CudaPackedAttention:
    """Causal attention within each sequence of a pack; an `Attend` without a cache."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
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
        # For whole sequences the strict tiles are also the fastest.
        tiles = strict_tiles(q_THd, k_TGd)
        o_THd, lse_HT = kernels.packed_attention(q_THd, k_TGd, v_TGd, cu, longest, tiles=tiles)
        ctx.longest = longest
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, cu, o_THd, lse_HT)
        return o_THd

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGd, cu, o_THd, lse_HT = ctx.saved_tensors
        found = packed_attention_backward(
            *(grad_outputs[0].contiguous(), q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu, ctx.longest)
        )
        return (*found, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The cache slots of the tokens of a pass, on the device: see `kernels.paged_attention`."""

    slots_T: Tensor
    """The slots that the pass writes its own keys and values to."""
    cu_q: Tensor
    contexts: Tensor
    tables: Tensor
    block_size: int
    longest: int
    strict: bool
    split_keys: int | None = None

    def attend(
        self, cache: Tensor, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> Tensor:
        """Write the new keys and values, then read them all; an `Attend` for one cache."""
        keys_SGd, values_SGd = cache[0, layer], cache[1, layer]
        store_kv(k_TGd, v_TGd, self.slots_T, keys_SGd, values_SGd)
        o_THd = kernels.paged_attention(
            q_THd,
            keys_SGd,
            values_SGd,
            cu_q=self.cu_q,
            context_lens=self.contexts,
            block_tables=self.tables,
            block_size=self.block_size,
            max_q=self.longest,
            tiles=strict_tiles(q_THd, keys_SGd) if self.strict else None,
            split_keys=self.split_keys,
        )
        return o_THd.flatten(1)


def pages(
    spans: Sequence[TokenSpan], *, block_size: int, strict: bool, device: torch.device
) -> Pages:
    """The pages of a pass over these spans."""
    tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.blocks)] = span.blocks
    return Pages(
        slots_T=_tensor(np.concatenate([span.slots(block_size) for span in spans]), device),
        cu_q=_tensor(np.cumsum([0, *map(len, spans)], dtype=np.int32), device),
        contexts=_tensor(np.array([span.stop for span in spans], np.int32), device),
        tables=_tensor(tables, device),
        block_size=block_size,
        longest=max(map(len, spans)),
        strict=strict,
    )


def strict_tiles(q_THd: Tensor, k_SGd: Tensor) -> kernels.Tiles:
    """The tiles of strict mode, which are the same for every pass."""
    return kernels.strict_tiles(q_THd.dtype, q_THd.shape[1] // k_SGd.shape[1])


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
