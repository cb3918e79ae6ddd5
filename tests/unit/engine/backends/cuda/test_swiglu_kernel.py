"""The gated activation's kernels against the plain function in float32, rounded once.

Tolerances: float32 differs by the exponential's last bits; one step of the 16-bit types (the
interpreter cuts bfloat16 off where the device rounds to nearest).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.engine.backends.cuda.swiglu import COLUMNS, swiglu, swiglu_gradients
from tinkex.engine.backends.torch import layers

pytestmark = pytest.mark.usefixtures("poisoned")

STEP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(5, 96), (1, 1), (3, COLUMNS + 36), (17, 130)]


def made(seed: int, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(device, dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected.to(dtype), rtol=STEP[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activation_equals_the_plain_one(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    gate, up = (made(seed, *shape, dtype=dtype, device=device) for seed in (1, 2))
    found = swiglu(gate, up)
    assert found.is_contiguous()
    close(found, layers.swiglu(gate.float(), up.float()), dtype)


def test_halves_of_a_joined_projection_are_read_where_they_lie(device: str) -> None:
    joined = made(3, 6, 2 * 100, dtype=torch.float32, device=device)
    gate, up = joined.chunk(2, dim=1)
    close(swiglu(gate, up), layers.swiglu(gate, up), torch.float32)


def test_columns_that_lie_across_memory_are_taken(device: str) -> None:
    gate, up = (made(seed, 40, 3, dtype=torch.float32, device=device).T for seed in (4, 5))
    close(swiglu(gate, up), layers.swiglu(gate, up), torch.float32)


def test_large_gates_neither_overflow_nor_turn_into_nan(device: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30]], device=device)
    gate.requires_grad_()
    up = torch.ones_like(gate)
    found = swiglu(gate, up)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 200.0, 1e30]], device=device)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), gate)
    torch.testing.assert_close(
        gradient, torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]], device=device)
    )


def test_activation_of_no_tokens_is_empty(device: str) -> None:
    nothing = torch.zeros(0, 64, device=device)
    assert swiglu(nothing, nothing).shape == (0, 64)


def test_a_row_is_the_same_alone_and_among_others(device: str) -> None:
    gate, up = (made(seed, 13, 130, dtype=torch.bfloat16, device=device) for seed in (6, 7))
    together = swiglu(gate, up)
    assert torch.equal(swiglu(gate[5:6], up[5:6])[0], together[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (3, COLUMNS + 36)], ids=str)
def test_gradients_equal_autograd(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    tokens, width = shape
    joined = made(8, tokens, 2 * width, dtype=dtype, device=device)
    gradient = made(9, *shape, dtype=dtype, device=device)
    gate, up = (half.requires_grad_() for half in joined.chunk(2, dim=1))
    found = torch.autograd.grad(swiglu(gate, up), (gate, up), gradient)
    plain = [half.detach().float().requires_grad_() for half in (gate, up)]
    expected = torch.autograd.grad(layers.swiglu(*plain), plain, gradient.float())
    close(found[0], expected[0], dtype)
    close(found[1], expected[1], dtype)


def test_both_gradients_share_one_buffer(device: str) -> None:
    gate, up, gradient = (
        made(seed, 4, 70, dtype=torch.float32, device=device) for seed in (10, 11, 12)
    )
    both = swiglu_gradients(gate, up, gradient)
    assert both.shape == (4, 140)
    assert both.is_contiguous()
    plain = [half.clone().requires_grad_() for half in (gate, up)]
    expected = torch.autograd.grad(layers.swiglu(*plain), plain, gradient)
    close(both, torch.cat(expected, dim=1), torch.float32)
