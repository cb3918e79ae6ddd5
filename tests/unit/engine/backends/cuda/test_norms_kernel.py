"""The norm kernels against the reference in `backends.torch.layers`.

Tolerances: float32 sums differ in order only; one step of the 16-bit types for every rounding
(the interpreter cuts bfloat16 off where the device rounds to nearest).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.engine.backends.cuda.norms import add_rms_norm, rms_norm, row_strides
from tinkex.engine.backends.torch import layers

pytestmark = pytest.mark.usefixtures("poisoned")

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2 * 2**-7}
SHAPES = [(7, 96), (1, 576), (5, 3, 64), (2, 3, 2, 100), (33, 1), (3, 2050)]


def made(seed: int, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4
    )


def heads_of_joined(joined: Tensor, first: int, count: int, size: int) -> Tensor:
    return joined[:, first * size : (first + count) * size].unflatten(1, (count, size))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_equals_the_plain_norm(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    x = made(1, *shape, dtype=dtype, device=device) * 3
    weight = made(2, shape[-1], dtype=dtype, device=device)
    found = rms_norm(x, weight, EPS)
    assert found.dtype == dtype
    assert found.is_contiguous()
    close(found, layers.rms_norm(x, weight, EPS), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80])
def test_norm_reads_heads_out_of_a_joined_projection(
    size: int, dtype: torch.dtype, device: str
) -> None:
    joined = made(3, 6, 9 * size, dtype=dtype, device=device)
    weight = made(4, size, dtype=dtype, device=device)
    for first, count in [(0, 5), (5, 2), (7, 2)]:
        x = heads_of_joined(joined, first, count, size)
        assert not x.is_contiguous()
        close(rms_norm(x, weight, EPS), layers.rms_norm(x, weight, EPS), dtype)


def test_norm_of_rows_that_lie_across_memory(device: str) -> None:
    x = made(5, 40, 6, dtype=torch.float32, device=device).T
    weight = made(6, 40, dtype=torch.float32, device=device)
    close(rms_norm(x, weight, EPS), layers.rms_norm(x, weight, EPS), torch.float32)


def test_norm_of_no_rows_is_empty(device: str) -> None:
    x = torch.zeros(0, 64, device=device)
    assert rms_norm(x, torch.ones(64, device=device), EPS).shape == (0, 64)


@pytest.mark.parametrize("width", [64, 96, 576])
def test_norm_of_a_row_is_the_same_alone_and_among_others(width: int, device: str) -> None:
    x = made(7, 29, width, dtype=torch.bfloat16, device=device)
    weight = made(8, width, dtype=torch.bfloat16, device=device)
    together = rms_norm(x, weight, EPS)
    for row in (0, 13, 28):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 96), (5, 3, 64), (2, 2050)], ids=str)
def test_gradient_of_the_norm_equals_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    x = made(9, *shape, dtype=dtype, device=device).requires_grad_()
    weight = made(10, shape[-1], dtype=dtype, device=device)
    gradient = made(11, *shape, dtype=dtype, device=device)
    rms_norm(x, weight, EPS).backward(gradient)
    plain = x.detach().float().requires_grad_()
    layers.rms_norm(plain, weight.float(), EPS).backward(gradient.float())
    assert x.grad is not None
    assert plain.grad is not None
    close(x.grad, plain.grad, dtype)


def test_gradient_reaches_the_joined_projection(device: str) -> None:
    joined = made(12, 4, 6 * 48, dtype=torch.float32, device=device).requires_grad_()
    weight = made(13, 48, dtype=torch.float32, device=device)
    gradient = made(14, 4, 3, 48, dtype=torch.float32, device=device)
    (found,) = torch.autograd.grad(
        rms_norm(heads_of_joined(joined, 2, 3, 48), weight, EPS), joined, gradient
    )
    (expected,) = torch.autograd.grad(
        layers.rms_norm(heads_of_joined(joined, 2, 3, 48), weight, EPS), joined, gradient
    )
    close(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [96, 576])
def test_adding_then_norming_equals_the_plain_two_steps(
    width: int, dtype: torch.dtype, device: str
) -> None:
    h = made(15, 9, 2 * width, dtype=dtype, device=device)[:, :width]
    delta = made(16, 9, width, dtype=dtype, device=device)
    weight = made(17, width, dtype=dtype, device=device)
    h_new, normed = add_rms_norm(h, delta, weight, EPS)
    close(h_new, h + delta, dtype)
    # From our own sum: its rounding is compared above, not twice.
    close(normed, layers.rms_norm(h_new, weight, EPS), dtype)


def test_adding_then_norming_a_row_is_the_same_alone_and_among_others(device: str) -> None:
    h = made(18, 11, 192, dtype=torch.bfloat16, device=device)
    delta = made(19, 11, 192, dtype=torch.bfloat16, device=device)
    weight = made(20, 192, dtype=torch.bfloat16, device=device)
    together = add_rms_norm(h, delta, weight, EPS)
    alone = add_rms_norm(h[6:7], delta[6:7], weight, EPS)
    assert torch.equal(alone[0][0], together[0][6])
    assert torch.equal(alone[1][0], together[1][6])


@pytest.mark.parametrize("used", ["both", "normed", "h_new"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_adding_then_norming_equals_autograd(
    used: str, dtype: torch.dtype, device: str
) -> None:
    h = made(21, 5, 96, dtype=dtype, device=device).requires_grad_()
    delta = made(22, 5, 96, dtype=dtype, device=device).requires_grad_()
    weight = made(23, 96, dtype=dtype, device=device)
    gradients = [made(seed, 5, 96, dtype=dtype, device=device) for seed in (24, 25)]
    keep = {"both": slice(0, 2), "h_new": slice(0, 1), "normed": slice(1, 2)}[used]
    h_new, normed = add_rms_norm(h, delta, weight, EPS)
    found = torch.autograd.grad((h_new, normed)[keep], (h, delta), gradients[keep])
    plain_new = h_new.detach().float().requires_grad_()
    plain = (plain_new * 1, layers.rms_norm(plain_new, weight.float(), EPS))
    (expected,) = torch.autograd.grad(
        plain[keep], plain_new, [gradient.float() for gradient in gradients[keep]]
    )
    close(found[0], expected, dtype)
    assert torch.equal(found[0], found[1])


def test_the_stride_of_a_single_row_makes_no_difference(device: str) -> None:
    x = made(26, 1, 96, dtype=torch.bfloat16, device=device)
    weight = made(27, 96, dtype=torch.bfloat16, device=device)
    odd = x.as_strided((1, 96), (7, 1))
    assert torch.equal(rms_norm(odd, weight, EPS), rms_norm(x, weight, EPS))
    assert row_strides(odd[:, None]) == row_strides(x[:, None])


def test_norm_rounds_where_the_plain_norm_rounds(device: str) -> None:
    x = made(28, 16, 256, dtype=torch.float16, device=device)
    weight = made(29, 256, dtype=torch.float16, device=device)
    # The last bit of a float32 sum decides one rounding in a thousand; a missing one, most.
    same = rms_norm(x, weight, EPS) == layers.rms_norm(x, weight, EPS)
    assert same.float().mean() > 0.99
    h_new, normed = add_rms_norm(x, x.flip(0), weight, EPS)
    assert torch.equal(h_new, x + x.flip(0))
    assert (normed == layers.rms_norm(h_new, weight, EPS)).float().mean() > 0.99
