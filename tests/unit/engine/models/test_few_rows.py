"""Few rows times a small weight: torch's bits, or no such product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tinkex.engine.models import few_rows
from tinkex.engine.models.few_rows import MOST, FewRows
from tinkex.engine.models.linear import ROW_STEP, Linear

# (inputs, outputs): added up in one go, in two, in blocks; the last has an odd width.
SHAPES = [(128, 256), (64, 64), (384, 128), (512, 128), (96, 40)]


def _weight(inputs: int, outputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inputs)
    return torch.randn(outputs, inputs, generator=generator)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_packed_products_have_the_bits_of_torch(inputs: int, outputs: int, threads: int) -> None:
    weight = _weight(inputs, outputs)
    linear = Linear(weight)
    few = linear.few_rows
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (ROW_STEP, 2 * ROW_STEP, 5 * ROW_STEP):
            x = torch.randn(rows, inputs)
            expected = F.linear(x, weight)
            assert torch.equal(linear.multiply(x, packed=True), expected)
            if few is not None:
                room = np.full((rows, outputs), np.nan, np.float32)
                few.bound(x.numpy(), room)()
                assert np.array_equal(room, expected.numpy())
    finally:
        torch.set_num_threads(before)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    linear = Linear(_weight(128, 768))
    x = torch.randn(64, 128)
    whole = linear.multiply(x, packed=True)
    for rows in (1, 2, 3, 4, 5, 8, 13, 40):
        assert torch.equal(linear.multiply(x[:rows], packed=True), whole[:rows]), rows


def test_a_product_is_computed_again_from_what_its_memory_holds_then() -> None:
    few = FewRows(np.eye(4, dtype=np.float32), 2)
    x, y = np.zeros((3, 4), np.float32), np.empty((3, 4), np.float32)
    product = few.bound(x, y)
    x[:] = np.arange(12).reshape(3, 4)
    product()
    assert np.array_equal(y, x)


def test_where_no_way_gives_the_bits_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def otherwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.flip(1) @ weight.flip(0)).clone()

    monkeypatch.setattr(few_rows.torch, "mm", otherwise)
    linear = Linear(_weight(128, 256))
    assert linear.few_rows is None
    monkeypatch.undo()
    x = torch.randn(4, 128)
    assert torch.equal(linear.multiply(x, packed=True), F.linear(x, linear.weight_OI))


def test_many_rows_and_biased_weights_are_left_to_torch() -> None:
    few = FewRows(np.zeros((100, 100), np.float32), 100)
    assert few.suits(MOST // 10_000)
    assert not few.suits(MOST // 10_000 + 1)
    assert Linear(_weight(8, 16), torch.zeros(16)).few_rows is None
