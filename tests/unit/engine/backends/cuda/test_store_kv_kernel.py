"""Keys and values arrive in their slots, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.backends.cuda.store_kv import store_kv

# (heads, head size): one block, several blocks, and a width that fills none.
SHAPES = [(2, 64), (16, 128), (3, 80), (9, 160)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_each_token_goes_to_its_slot(heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    tokens, slots = 7, 40
    generator = torch.Generator().manual_seed(heads)
    # As a joined projection leaves them: keys and values within longer rows.
    rows = torch.randn(tokens, 4 * heads, dim, generator=generator).to(device, dtype)
    k_TGd, v_TGd = rows[:, heads : 2 * heads], rows[:, 3 * heads :]
    cache = torch.randn(2, 3, slots, heads, dim, generator=generator).to(device, dtype)
    slots_T = torch.randperm(slots, generator=generator)[:tokens].to(device)
    expected = cache.clone()
    expected[0, 1, slots_T], expected[1, 1, slots_T] = k_TGd, v_TGd
    store_kv(k_TGd, v_TGd, slots_T, cache[0, 1], cache[1, 1])
    assert torch.equal(cache, expected)


def test_heads_that_lie_apart_are_refused(device: str) -> None:
    apart = torch.zeros(2, 4, 16, device=device)[:, ::2]
    cache = torch.zeros(2, 8, 2, 16, device=device)
    with pytest.raises(AssertionError, match="contiguous"):
        store_kv(apart, apart, torch.arange(2, device=device), cache[0], cache[1])
