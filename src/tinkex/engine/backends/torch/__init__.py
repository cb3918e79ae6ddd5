"""The reference implementation of every primitive, in plain PyTorch; it runs on any device."""

from __future__ import annotations

from tinkex.engine.attention.packed import PackedAttention
from tinkex.engine.attention.paged import PagedAttention, new_cache
from tinkex.engine.backends.table import Backend
from tinkex.engine.backends.torch.adamw import adamw
from tinkex.engine.backends.torch.cross_entropy import cross_entropy, normalizers
from tinkex.engine.backends.torch.layers import add_norm, rms_norm, rotated_heads, swiglu
from tinkex.engine.backends.torch.linear import Linear
from tinkex.engine.backends.torch.lora_products import expand_add_, shrink
from tinkex.engine.backends.torch.pick import pick

__all__ = ["TORCH"]

TORCH = Backend(
    name="torch",
    linear=Linear,
    norm=rms_norm,
    add_norm=add_norm,
    rotate=rotated_heads,
    gate=swiglu,
    packed_attention=PackedAttention,
    paged_attention=PagedAttention,
    new_cache=new_cache,
    shrink=shrink,
    expand_add_=expand_add_,
    cross_entropy=cross_entropy,
    normalizers=normalizers,
    adamw=adamw,
    sample=pick,
)
