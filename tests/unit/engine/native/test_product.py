"""Products in machine code of our own, and what stands in for them elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.native.processor import needs_machine_code
from tinkex.engine.models.packed import OneDnnProduct, SteppedProduct, packed_product
from tinkex.engine.native import NativeProduct, product

SHAPES = [(16, 16), (960, 576), (576, 1536), (64, 4128)]
ROWS = (1, 2, 3, 4, 5, 12, 13, 16, 17, 100, 128, 129, 260)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _native(weight_OI: torch.Tensor) -> NativeProduct:
    found = NativeProduct.of(weight_OI)
    assert found is not None
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest):
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(usual)


@needs_machine_code
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product_for_any_number_of_rows(shape: tuple[int, int], threads: int) -> None:
    weight = _random(*shape) * shape[1] ** -0.5
    native = _native(weight)
    for rows in ROWS:
        x = _random(rows, shape[1], seed=rows)
        out = torch.full((rows, shape[0]), torch.nan)
        assert native(x, out) is out
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(native(x), out)


@needs_machine_code
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_neither_on_company_nor_on_threads(shape: tuple[int, int]) -> None:
    native, x = _native(_random(*shape)), _random(260, shape[1], seed=1)
    usual = torch.get_num_threads()
    whole = native(x)
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(native(x), whole)
            for first in (0, 7, 131, 259):
                for rows in (1, 2, 5, 16, 40):
                    part = slice(first, first + rows)
                    assert torch.equal(native(x[part]), whole[part])
    finally:
        torch.set_num_threads(usual)


@needs_machine_code
def test_rows_that_lie_apart_and_a_weight_that_is_turned_are_taken_as_they_are() -> None:
    weight, x = _random(48, 32), _random(20, 64, seed=1)[:, ::2]
    expected = x.double() @ weight.double().T
    found = _native(_random(48, 32).T.contiguous().T)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_machine_code
def test_a_bound_product_reads_what_is_there_when_it_is_called() -> None:
    weight, x, y = _random(48, 32), torch.zeros(5, 32), torch.full((5, 48), torch.nan)
    bound = _native(weight).bound(x, y)
    for seed in (1, 2):
        x.copy_(_random(5, 32, seed=seed))
        bound()
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@needs_machine_code
def test_a_number_that_is_none_stays_in_its_row() -> None:
    native, x = _native(_random(32, 2080)), _random(18, 2080, seed=1)
    whole = native(x)
    x[5, 2070] = torch.nan
    found = native(x)
    assert found[5].isnan().all()
    rest = [row for row in range(18) if row != 5]
    assert torch.equal(found[rest], whole[rest])


@pytest.mark.parametrize("shape", [(70, 32), (32, 70), (8, 16)])
def test_other_sizes_are_left_to_the_library(shape: tuple[int, int]) -> None:
    assert NativeProduct.of(_random(*shape)) is None
    assert not isinstance(packed_product(_random(*shape)), NativeProduct)


@pytest.mark.parametrize("shape", [(64, 64), (576, 960)])
def test_what_stands_in_for_it_gives_rows_the_same_bits_too(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "library", lambda: None)
    weight, x = _random(*shape) * shape[1] ** -0.5, _random(64, shape[1], seed=1)
    made = packed_product(weight)
    assert not isinstance(made, NativeProduct)
    whole = made(x)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    out = torch.full((8, shape[0]), torch.nan)
    for first in (0, 4, 56):
        made.bound(x[first : first + 8], out)()
        assert torch.equal(out, whole[first : first + 8])


@pytest.mark.parametrize("kind", [OneDnnProduct, SteppedProduct])
def test_the_librarys_products_are_products(kind: type[OneDnnProduct | SteppedProduct]) -> None:
    weight, x = _random(576, 960) * 960**-0.5, _random(64, 960, seed=1)
    found, out = kind(weight)(x), torch.full((64, 576), torch.nan)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    kind(weight).bound(x, out)()
    assert torch.equal(out, found)
