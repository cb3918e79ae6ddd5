"""The primitives in Triton, for CUDA devices.

Imported only where there are a device and Triton.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tinkex.engine.backends.cuda.adapters import CudaAdapters
from tinkex.engine.backends.cuda.attention import CudaPackedAttention, pages
from tinkex.engine.backends.cuda.cross_entropy import cross_entropy, normalizers
from tinkex.engine.backends.cuda.decode_graphs import DecodeGraphs
from tinkex.engine.backends.cuda.fixed_rows import FixedRows
from tinkex.engine.backends.cuda.norms import add_rms_norm, rms_norm
from tinkex.engine.backends.cuda.rope import rotate_pair
from tinkex.engine.backends.cuda.strict_products import CudaProducts
from tinkex.engine.backends.cuda.swiglu import swiglu
from tinkex.engine.backends.torch import TORCH
from tinkex.engine.backends.torch.layers import split_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.attention.paged import TokenSpan
    from tinkex.engine.backends.torch.layers import Rotation
    from tinkex.engine.decoder import Attend, DecoderConfig

__all__ = ["CUDA"]


def _rotate(
    q_TX: Tensor,
    k_TY: Tensor,
    rotation: Rotation,
    norms_2d: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    head_dim = 2 * rotation.cos_T1F.shape[-1]
    q_THd, k_TGd = split_heads(q_TX, head_dim), split_heads(k_TY, head_dim)
    return rotate_pair(q_THd, k_TGd, rotation.cos_T1F, rotation.sin_T1F, norms_2d, eps)


def _paged_attention(
    cache: Tensor, spans: Sequence[TokenSpan], *, block_size: int, strict: bool
) -> Attend:
    found = pages(spans, block_size=block_size, strict=strict, device=cache.device)
    return partial(found.attend, cache)


def _new_cache(config: DecoderConfig, slots: int, like: Tensor) -> Tensor:
    shape = (2, config.num_layers, slots, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _strict_products() -> Callable[..., CudaProducts]:
    # One `FixedRows` for all passes of a trainer: finding its block sizes takes trial products.
    return partial(CudaProducts, rows=FixedRows())


CUDA = replace(
    TORCH,
    name="cuda",
    norm=rms_norm,
    add_norm=add_rms_norm,
    rotate=_rotate,
    gate=swiglu,
    packed_attention=CudaPackedAttention,
    paged_attention=_paged_attention,
    new_cache=_new_cache,
    cross_entropy=cross_entropy,
    normalizers=normalizers,
    sampling_adapters=CudaAdapters,
    decode_steps=DecodeGraphs,
    strict_products=_strict_products,
    copies_adapters=True,
)
