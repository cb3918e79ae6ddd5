"""Products of new matrices in machine code: an adapter's, forth and back."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.native.processor import needs_machine_code
from tinkex.engine.native import Passing, passing, place, suits

SIZES = [(48, 32, 16), (1536, 576, 32), (64, 2080, 32), (32, 48, 256)]
"""Outputs, inputs, rank."""


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _cases(rows: int, outputs: int, inputs: int, rank: int):
    """All products of an adapter: where to, factors, scale, and whether it is added."""
    x, z = _random(rows, inputs, seed=1), _random(rows, rank, seed=2)
    # Outputs that others lie beside, as those of joined projections do.
    y, dy = (_random(rows, 3 * outputs, seed=n)[:, outputs : 2 * outputs] for n in (3, 4))
    a, b = _random(rank, inputs, seed=5) * inputs**-0.5, _random(outputs, rank, seed=6) * 0.1
    nothing = torch.nan
    return {
        "shrink": (torch.full((rows, rank), nothing), x, a.T, 1.0, False),
        "expand": (y, z, b.T, 0.5, True),
        "inner slope": (torch.full((rows, rank), nothing), dy, b, 0.5, False),
        "slope": (_random(rows, inputs, seed=7), z, a, 1.0, True),
        "gradient of A": (torch.full((rank, inputs), nothing), z.T, x, 1.0, False),
        "gradient of B": (torch.full((outputs, rank), nothing), dy.T, z, 0.5, False),
    }


def _run(cases: dict) -> dict[str, torch.Tensor]:
    products = Passing()
    for out, left, right, scale, add in cases.values():
        shape = left.shape[0], right.shape[1], left.shape[1]
        products.multiply(place(out), place(left), place(right), shape, scale, add=add)
    products.run()
    return {name: case[0] for name, case in cases.items()}


@needs_machine_code
@pytest.mark.parametrize("rows", [1, 3, 16, 77, 300])
@pytest.mark.parametrize("sizes", SIZES)
def test_many_products_in_one_call_are_each_of_them(sizes: tuple[int, int, int], rows: int) -> None:
    cases = _cases(rows, *sizes)
    expected = {
        name: scale * (left.double() @ right.double()) + (out.double() if add else 0.0)
        for name, (out, left, right, scale, add) in cases.items()
    }
    for name, found in _run(cases).items():
        # Sums of up to 2,080 products of numbers around one.
        size = float(expected[name].abs().max())
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-5 * size)


@needs_machine_code
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_depend_neither_on_threads_nor_on_company(sizes: tuple[int, int, int]) -> None:
    usual = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            answers.append(_run(_cases(77, *sizes)))
    finally:
        torch.set_num_threads(usual)
    for found in answers[1:]:
        assert all(torch.equal(found[name], answers[0][name]) for name in found)
    fewer = _cases(77, *sizes)
    for name in ("shrink", "expand", "inner slope", "slope"):
        out, left, right, scale, add = fewer[name]
        alone = _run({name: (out[5:8], left[5:8], right, scale, add)})[name]
        assert torch.equal(alone, answers[0][name][5:8])


@needs_machine_code
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_product_may_read_what_the_one_before_it_wrote(threads: int) -> None:
    x, a, b = _random(50, 64), _random(32, 64, seed=1), _random(96, 32, seed=2)
    z, y = torch.full((50, 32), torch.nan), torch.zeros(50, 96)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products = Passing()
        products.shrink(place(z), place(x), a, 50)
        products.expand_add(place(y), place(z), b, 50, 2.0)
        products.run()
    finally:
        torch.set_num_threads(usual)
    expected = 2.0 * (x.double() @ a.double().T) @ b.double().T
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-3)


@needs_machine_code
def test_what_there_is_no_code_for() -> None:
    assert suits(_random(32, 16))
    assert not suits(_random(32, 8))
    assert not suits(_random(24, 16))
    assert not suits(_random(32, 16).double())
    assert not suits(_random(16, 32).T)


def test_machines_without_it_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "passing", lambda: None)
    assert not suits(_random(32, 16))


def test_sizes_that_would_be_read_beyond_their_end_are_refused() -> None:
    x, a = _random(5, 20), _random(16, 20)
    with pytest.raises(AssertionError):
        Passing().shrink(place(torch.empty(5, 16)), place(x), a, 5)
    with pytest.raises(AssertionError):
        Passing().multiply(place(torch.empty(5, 24)), place(x), place(a.T), (5, 24, 16))
    apart = _random(5, 64)[:, ::2]
    with pytest.raises(AssertionError):
        Passing().shrink(place(torch.empty(5, 16)), place(apart), _random(16, 32), 5)
