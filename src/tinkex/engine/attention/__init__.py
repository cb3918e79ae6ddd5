"""Causal attention, one file per way: packed for training, paged for sampling.

The factories choose by device; a device of its own kind adds a file and a line in here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tinkex.engine.attention.packed import PackedAttention
from tinkex.engine.attention.paged import PagedAttention, Span, cache_shape
from tinkex.engine.backends import has_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.decoder import Attend, DecoderConfig

__all__ = [
    "PackedAttention",
    "PagedAttention",
    "Span",
    "new_cache",
    "packed_attention",
    "paged_attention",
]


_ALIGNMENT: Final = 64
"""Of the memory that torch allocates; its vector code is fastest on it."""


def packed_attention(lengths: Sequence[int], *, like: torch.Tensor) -> Attend:
    """Differentiable attention within each sequence of a pack, without a cache.

    `like` is any tensor of the device and type that the pack will have. The bits of a token's
    output depend on its own sequence alone.
    """
    if has_kernels(like):
        from tinkex.engine.backends.cuda.attention import CudaPackedAttention

        return CudaPackedAttention(lengths, device=like.device)
    return PackedAttention(lengths, like.device)


def new_cache(config: DecoderConfig, slots: int, like: torch.Tensor) -> torch.Tensor:
    """An empty cache for so many tokens, on the device and in the type of `like`."""
    shape = cache_shape(config, slots)
    if has_kernels(like):
        shape = (2, config.num_layers, slots, config.num_kv_heads, config.head_dim)
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return _untouched_zeros(shape, like.dtype)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages take neither time nor memory before they are written.

    `torch.zeros` writes all of them: a gigabyte, and seconds of every start, for a cache of which a
    small model uses little.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(size_bytes + _ALIGNMENT, np.uint8))  # pyright: ignore[reportUnknownMemberType] - torch types it loosely
    start = -room.data_ptr() % _ALIGNMENT
    return room[start : start + size_bytes].view(dtype).view(shape)


def paged_attention(
    cache: torch.Tensor, spans: Sequence[Span], *, block_size: int, strict: bool
) -> Attend:
    """Attention of packed spans over a paged cache that `new_cache` made.

    Writes the spans' own keys and values first. Strict means that a token's output has the bits
    that it has in a pack; without kernels it always does.
    """
    if has_kernels(cache):
        from tinkex.engine.backends.cuda.attention import pages

        found = pages(spans, block_size=block_size, strict=strict, device=cache.device)
        return partial(found.attend, cache)
    return PagedAttention(cache, spans, block_size=block_size)
