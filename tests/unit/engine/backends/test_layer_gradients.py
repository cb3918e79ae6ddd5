"""The gradients of norm, rotation and gate, which are written by hand, against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.engine.backends.torch.layers import rms_norm, rotation, swiglu


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two row-strided views of one tensor, as joined projections give them."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotation(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.parametrize("shape", [(5, 12), (5, 3, 8)])
def test_the_norm_and_its_gradient(shape):
    x, weight = _random(*shape).requires_grad_(), 1 + 0.1 * _random(shape[-1], seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight, 1e-5), x)


def test_the_norm_of_a_strided_view():
    joined, weight = _random(5, 24).requires_grad_(), _random(12, seed=1)
    assert torch.autograd.gradcheck(lambda x: rms_norm(_halves(x)[1], weight, 1e-5), joined)


def test_the_rotation_and_its_gradient():
    positions, frequencies = torch.arange(5), torch.tensor([1.0, 0.3, 0.01, 0.0])
    turn = rotation(positions, frequencies)
    joined = _random(5, 48).requires_grad_()
    x = _halves(joined)[1].view(5, 3, 8)
    angles = (positions[:, None] * frequencies)[:, None, :].double()
    # Angles, sines and cosines are float32.
    torch.testing.assert_close(turn(x), plain_rotation(x, angles), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: turn(_halves(x)[1].view(5, 3, 8)), joined)
    there = turn(x).detach()
    torch.testing.assert_close(turn.rotated(there, back=True), x.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [7, 32])
def test_the_gate_and_its_gradient(width):
    joined = (3 * _random(5, 2 * width)).requires_grad_()
    gate, up = _halves(joined)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(lambda x: swiglu(*_halves(x)), joined)


def test_the_gates_gradients_are_adjacent():
    gate, up = (_random(5, 8, seed=n).requires_grad_() for n in (0, 1))
    left, right = torch.autograd.grad(swiglu(gate, up).sum(), (gate, up))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert right.storage_offset() - left.storage_offset() == 8
    assert left.stride() == right.stride() == (16, 1)
