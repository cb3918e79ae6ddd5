"""The products of an adapter give a row the same bits in any batch, on any number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tinkex.engine.backends.torch.layers import on_threads
from tinkex.engine.backends.torch.lora_products import expand_add_, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Sizes that fit no vector are cut in other places when several threads share the rows.
SIZES = [(3, 36), (16, 36), (33, 50), (8, 64)]
PARTS = [(0, 1), (3, 5), (3, 16), (7, 20), (100, 52), (3, 177), (420, 180)]
ROWS = 600


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _assert_same_bits(compute: Callable[[slice], Tensor]) -> None:
    whole = compute(slice(ROWS))
    for first, rows in PARTS:
        part = slice(first, first + rows)
        assert torch.equal(compute(part), whole[part]), f"rows {first} to {first + rows}"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rank", "size"), SIZES)
def test_a_row_is_shrunk_to_the_same_bits_in_any_batch(rank: int, size: int, threads: int) -> None:
    a, x = _random(rank, size, seed=1), _random(ROWS, size, seed=2)
    with on_threads(threads):
        _assert_same_bits(lambda part: shrink(x[part], a))
        found = shrink(x, a)
    torch.testing.assert_close(found.double(), x.double() @ a.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rank", "size"), SIZES)
def test_what_is_added_to_a_row_has_the_same_bits_in_any_batch(
    rank: int, size: int, threads: int
) -> None:
    b, z, y = (_random(*shape, seed=seed) for seed, shape in enumerate(_shapes(rank, size)))

    def added(part: slice) -> Tensor:
        rows = y[part].clone()
        expand_add_(rows, z[part], b, 0.7)
        return rows

    with on_threads(threads):
        _assert_same_bits(added)
        found = added(slice(ROWS))
    expected = y.double() + 0.7 * z.double() @ b.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def _shapes(rank: int, size: int) -> tuple[tuple[int, int], ...]:
    return (size, rank), (ROWS, rank), (ROWS, size)
