"""Which way to multiply is taken for a weight: the first that passes its trial on this machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from tests.own_thread import own_records
from tinkex.engine.backends.torch.batch_invariant import (
    BlockProduct,
    ProductKind,
    SteppedProduct,
    first_that_passes,
    invariant_product,
)
from tinkex.engine.backends.torch.row_trial import rows_agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SHAPES = [(16, 16), (8, 16), (36, 50), (70, 33), (576, 576), (64, 1100)]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _ByRows:
    """Right in itself; `bend` gives it a rounding that depends on the other rows."""

    row_step = 1

    def __init__(self, weight_OI: Tensor, bend: Callable[[Tensor], Tensor]) -> None:
        self._right = BlockProduct(weight_OI, 1)
        self._bend = bend

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        y_TO = self._bend(self._right(x_TI))
        return y_TO if out is None else out.copy_(y_TO)


def _next(y: Tensor) -> Tensor:
    return torch.nextafter(y, torch.full_like(y, torch.inf))


def _by_count(y_TO: Tensor) -> Tensor:
    return _next(y_TO) if len(y_TO) < 16 else y_TO


def _by_leftover(y_TO: Tensor) -> Tensor:
    whole = len(y_TO) - len(y_TO) % 8
    return torch.cat((y_TO[:whole], _next(y_TO[whole:])))


def _by_place(y_TO: Tensor) -> Tensor:
    odd = torch.arange(len(y_TO))[:, None] % 16 == 13
    return torch.where(odd, _next(y_TO), y_TO)


def _by_size(y_TO: Tensor) -> Tensor:
    return _next(y_TO) if len(y_TO) >= 128 else y_TO


BENDS = [_by_count, _by_leftover, _by_place, _by_size]


@pytest.mark.parametrize("bend", BENDS)
def test_the_trial_notices_a_last_bit_that_depends_on_other_rows(
    bend: Callable[[Tensor], Tensor],
) -> None:
    right, x = BlockProduct(_random(24, 40), 1), _random(160, 40, seed=1)
    assert rows_agree(lambda part: right(x[part]), len(x))
    assert not rows_agree(lambda part: bend(right(x[part])), len(x))


def test_a_way_that_fails_its_trial_is_left_out_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Tensor] = []

    def make(weight_OI: Tensor) -> _ByRows:
        made.append(weight_OI)
        return _ByRows(weight_OI, _by_count)

    ways = (
        ProductKind("absent", lambda _: None),
        ProductKind("bent", make),
        ProductKind("right", lambda weight_OI: BlockProduct(weight_OI, 1)),
    )
    with caplog.at_level(logging.INFO, "tinkex"):
        for seed in (1, 2):
            found = first_that_passes(_random(24, 40, seed=seed), ways)[1]
            assert isinstance(found, BlockProduct)
    assert len(made) == 1
    (record,) = own_records(caplog)
    assert "the bent product is not used for weights of shape (24, 40)" in record.getMessage()


def test_a_way_that_passed_is_not_tried_again() -> None:
    calls: list[int] = []

    def noted(y_TO: Tensor) -> Tensor:
        calls.append(len(y_TO))
        return y_TO

    ways = (ProductKind("right", lambda weight_OI: _ByRows(weight_OI, noted)),)
    first_that_passes(_random(24, 40), ways)
    assert calls
    calls.clear()
    assert isinstance(first_that_passes(_random(24, 40, seed=1), ways)[1], _ByRows)
    assert not calls
    first_that_passes(_random(24, 41), ways)
    assert calls


def test_the_trial_leaves_the_random_numbers_of_torch_alone() -> None:
    before = torch.get_rng_state()
    first_that_passes(_random(24, 43), (ProductKind("stepped", SteppedProduct),))
    assert torch.equal(torch.get_rng_state(), before)


def test_where_every_way_fails_rows_are_multiplied_one_by_one() -> None:
    weight, x = _random(24, 42), _random(21, 42, seed=1)
    way, found = first_that_passes(weight, (ProductKind("bent", lambda w: _ByRows(w, _by_count)),))
    assert way.name == "1-row"
    whole = found(x)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    for row in range(21):
        assert torch.equal(found(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("count", [1, 4, 16, 35])
def test_blocks_give_the_product_of_any_number_of_rows(rows: int, count: int) -> None:
    weight, x = _random(24, 40), _random(count, 40, seed=1)
    product, out = BlockProduct(weight, rows), torch.full((count, 24), torch.nan)
    product(x, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(product(x), out)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_taken_gives_rows_the_same_bits(shape: tuple[int, int], turned: bool) -> None:
    weight = _random(*shape[::-1]).T if turned else _random(*shape)
    product, x = invariant_product(weight), _random(72, shape[1], seed=1)
    whole = product(x)
    for first, rows in ((0, 4), (3, 4), (5, 12), (8, 36), (40, 32), (68, 4)):
        part = slice(first, first + rows)
        assert torch.equal(product(x[part]), whole[part])
