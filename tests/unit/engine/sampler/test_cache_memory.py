"""The cache of keys and values costs nothing before it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tinkex.engine.attention.paged import new_cache
from tinkex.engine.models.tiny import TINY_CONFIG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_zero_aligned_and_of_the_type_of_the_weights(dtype: torch.dtype) -> None:
    cache = new_cache(TINY_CONFIG, 64, torch.empty(1, dtype=dtype))
    assert cache.dtype == dtype
    assert cache.data_ptr() % 64 == 0
    assert cache.is_contiguous()
    assert not cache.any()
    cache[:] = 1
    assert bool((cache == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_were_not_written_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    cache = new_cache(TINY_CONFIG, 1 << 17, torch.empty(1))
    size = cache.numel() * cache.element_size()
    assert size > 1 << 26
    assert resident_bytes() - before < size / 4
