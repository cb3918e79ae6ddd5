"""The rotation kernels against the reference in `backends.torch.layers`.

Tolerances: float32 sums differ in order only; one step of the 16-bit types for every rounding
(the interpreter cuts bfloat16 off where the device rounds to nearest), by the size of a pair.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.engine.backends.cuda.rope import rotate_pair
from tinkex.engine.backends.torch import layers

pytestmark = pytest.mark.usefixtures("poisoned")

EPS = 1e-6
STEP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(5, 3, 64), (1, 1, 2), (7, 9, 128), (3, 5, 80), (19, 2, 10)]


def made(seed: int, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def turns(tokens: int, size: int, device: str) -> layers.Rotation:
    positions = torch.arange(tokens, device=device) * 37 % 101
    frequencies = 0.9 ** torch.arange(size // 2, dtype=torch.float32, device=device)
    return layers.rotation(positions, frequencies)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    # Turning mixes the halves of a head, so an error is measured by the pair's length.
    a, b = expected.float().chunk(2, -1)
    length = torch.sqrt(a * a + b * b)
    bound = torch.cat((length, length), -1) * (STEP[dtype] * roundings) + 1e-7
    assert found.shape == expected.shape
    assert ((found.float() - expected.float()).abs() <= bound).all()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All heads, the first of them as a query."""
    return torch.cat(rotate_pair(x[:, :1], x[:, 1:], cos, sin), dim=1)


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    norms = torch.stack((weight, weight))
    return torch.cat(rotate_pair(x[:, :1], x[:, 1:], cos, sin, norms, eps), dim=1)


def heads_of_joined(joined: Tensor, first: int, count: int, size: int) -> Tensor:
    return joined[:, first * size : (first + count) * size].unflatten(1, (count, size))


@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_equals_the_plain_rotation(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    x = made(1, *shape, dtype=dtype, device=device)
    rotation = turns(shape[0], shape[2], device)
    found = rotate(x, rotation.cos_T1F, rotation.sin_T1F)
    assert found.dtype == dtype
    close(found, rotation(x), dtype)


@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_rotation_equal_the_plain_two_steps(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    x = made(2, *shape, dtype=dtype, device=device) * 2
    weight = made(3, shape[2], dtype=dtype, device=device)
    rotation = turns(shape[0], shape[2], device)
    found = norm_rotate(x, weight, EPS, rotation.cos_T1F, rotation.sin_T1F)
    assert found.dtype == dtype
    close(found, rotation(layers.rms_norm(x, weight, EPS)), dtype, roundings=3)


@pytest.mark.parametrize("size", [64, 20])
def test_heads_are_read_out_of_a_joined_projection(size: int, device: str) -> None:
    joined = made(4, 6, 8 * size, dtype=torch.float32, device=device)
    weight = made(5, size, dtype=torch.float32, device=device)
    rotation = turns(6, size, device)
    x = heads_of_joined(joined, 3, 4, size)
    assert not x.is_contiguous()
    close(rotate(x, rotation.cos_T1F, rotation.sin_T1F), rotation(x), torch.float32)
    found = norm_rotate(x, weight, EPS, rotation.cos_T1F, rotation.sin_T1F)
    close(found, rotation(layers.rms_norm(x, weight, EPS)), torch.float32, roundings=3)


def test_rotation_of_heads_that_lie_across_memory(device: str) -> None:
    x = made(6, 4, 32, 3, dtype=torch.float32, device=device).transpose(1, 2)
    rotation = turns(4, 32, device)
    close(rotate(x, rotation.cos_T1F, rotation.sin_T1F), rotation(x), torch.float32)


def test_rotation_of_no_tokens_is_empty(device: str) -> None:
    x = torch.zeros(0, 4, 64, device=device)
    rotation = turns(0, 64, device)
    assert rotate(x, rotation.cos_T1F, rotation.sin_T1F).shape == (0, 4, 64)


def test_a_token_turns_the_same_alone_and_among_others(device: str) -> None:
    x = made(7, 23, 3, 80, dtype=torch.bfloat16, device=device)
    weight = made(8, 80, dtype=torch.bfloat16, device=device)
    cos, sin = turns(23, 80, device).cos_T1F, turns(23, 80, device).sin_T1F
    turned, normed = rotate(x, cos, sin), norm_rotate(x, weight, EPS, cos, sin)
    for token in (0, 11, 22):
        one = slice(token, token + 1)
        assert torch.equal(rotate(x[one], cos[one], sin[one])[0], turned[token])
        alone = norm_rotate(x[one], weight, EPS, cos[one], sin[one])
        assert torch.equal(alone[0], normed[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 64), (3, 5, 80)], ids=str)
def test_gradient_of_the_rotation_equals_autograd(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    x = made(9, *shape, dtype=dtype, device=device).requires_grad_()
    gradient = made(10, *shape, dtype=dtype, device=device)
    rotation = turns(shape[0], shape[2], device)
    turned = rotate(x, rotation.cos_T1F, rotation.sin_T1F)
    (found,) = torch.autograd.grad(turned, x, gradient)
    plain = x.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(rotation(plain), plain, gradient.float())
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80])
def test_gradient_of_norm_and_rotation_equals_autograd(
    size: int, dtype: torch.dtype, device: str
) -> None:
    joined = made(11, 6, 5 * size, dtype=dtype, device=device).requires_grad_()
    weight = made(12, size, dtype=dtype, device=device)
    gradient = made(13, 6, 3, size, dtype=dtype, device=device)
    rotation = turns(6, size, device)
    x = heads_of_joined(joined, 1, 3, size)
    turned = norm_rotate(x, weight, EPS, rotation.cos_T1F, rotation.sin_T1F)
    (found,) = torch.autograd.grad(turned, joined, gradient)
    plain = joined.detach().float().requires_grad_()
    normed = layers.rms_norm(heads_of_joined(plain, 1, 3, size), weight.float(), EPS)
    (expected,) = torch.autograd.grad(rotation(normed), plain, gradient.float())
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found, expected.to(dtype), rtol=rtol, atol=rtol / 8)


def test_norm_and_rotation_round_where_the_plain_steps_round(device: str) -> None:
    x = made(14, 16, 4, 64, dtype=torch.float16, device=device)
    weight = made(15, 64, dtype=torch.float16, device=device)
    rotation = turns(16, 64, device)
    found = norm_rotate(x, weight, EPS, rotation.cos_T1F, rotation.sin_T1F)
    expected = rotation(layers.rms_norm(x, weight, EPS))
    # The last bit of a float32 sum decides one rounding in a thousand; a missing one, most.
    assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("apart", [False, True], ids=["side-by-side", "apart"])
def test_queries_and_keys_have_norms_of_their_own(apart: bool, device: str) -> None:
    joined = made(16, 6, 9 * 32, dtype=torch.float32, device=device).requires_grad_()
    norms = made(17, 2, 32, dtype=torch.float32, device=device)
    rotation = turns(6, 32, device)
    q, k = heads_of_joined(joined, 0, 4, 32), heads_of_joined(joined, 5 if apart else 4, 2, 32)
    found = rotate_pair(q, k, rotation.cos_T1F, rotation.sin_T1F, norms, EPS)
    expected = [
        rotation(layers.rms_norm(x, norm, EPS)) for x, norm in zip((q, k), norms, strict=True)
    ]
    gradients = [
        made(18 + i, *x.shape, dtype=torch.float32, device=device) for i, x in enumerate(found)
    ]
    for mine, plain in zip(found, expected, strict=True):
        close(mine, plain, torch.float32, roundings=3)
    (gradient,) = torch.autograd.grad(found, joined, gradients)
    (reference,) = torch.autograd.grad(expected, joined, gradients)
    torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


def test_results_are_adjacent(device: str) -> None:
    x = made(20, 5, 6, 16, dtype=torch.float32, device=device)
    rotation = turns(5, 16, device)
    q, k = rotate_pair(x[:, :4], x[:, 4:], rotation.cos_T1F, rotation.sin_T1F)
    assert k.data_ptr() - q.data_ptr() == 4 * 16 * 4
    assert q.stride() == k.stride() == (6 * 16, 16, 1)
