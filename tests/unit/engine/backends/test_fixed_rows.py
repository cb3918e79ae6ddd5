"""Products in blocks of rows: a trial of the same call decides which block sizes are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.engine.backends.cuda.fixed_rows import BLOCK_ROWS, LARGE_BLOCKS, FixedRows

LARGE = LARGE_BLOCKS[-1]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, BIAS, X = noise(1, 8, 4), noise(2, 8), noise(3, LARGE + 5, 4)


class Library:
    """A product of one term, so that it rounds once; bent, large blocks differ in the last bit."""

    def __init__(self, *, bent_with_bias: bool, bent_without: bool) -> None:
        self._bent = {True: bent_with_bias, False: bent_without}
        self.sizes: list[int] = []

    def __call__(
        self, x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        self.sizes.append(len(x_CI))
        y_CO = x_CI[:, :1] * weight_OI[:, 0]
        if bias_O is not None:
            y_CO = y_CO + bias_O
        if self._bent[bias_O is not None] and len(x_CI) > BLOCK_ROWS:
            y_CO = torch.nextafter(y_CO, torch.full_like(y_CO, torch.inf))
        return y_CO.to(dtype)


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("first", [None, BIAS])
def test_rows_have_the_same_bits_where_only_calls_with_a_bias_depend_on_other_rows(
    bias: Tensor | None, first: Tensor | None
) -> None:
    library = Library(bent_with_bias=True, bent_without=False)
    rows = FixedRows(library)
    rows.linear(X[:3], WEIGHT, first)  # what is known of one call says nothing about the other
    whole = rows.linear(X, WEIGHT, bias)
    for start, stop in ((0, 1), (7, 300), (LARGE, LARGE + 5)):
        assert torch.equal(rows.linear(X[start:stop], WEIGHT, bias), whole[start:stop])


def test_calls_without_a_bias_keep_their_large_blocks() -> None:
    library = Library(bent_with_bias=True, bent_without=False)
    rows = FixedRows(library)
    for bias, expected in ((None, [LARGE, BLOCK_ROWS]), (BIAS, [BLOCK_ROWS] * 5)):
        rows.linear(X[:1], WEIGHT, bias)
        library.sizes.clear()
        rows.linear(X, WEIGHT, bias)
        assert library.sizes == expected


def test_the_trial_of_a_call_without_a_bias_is_made_without_one() -> None:
    library = Library(bent_with_bias=False, bent_without=True)
    rows = FixedRows(library)
    whole = rows.linear(X, WEIGHT)
    assert torch.equal(rows.linear(X[:9], WEIGHT), whole[:9])
