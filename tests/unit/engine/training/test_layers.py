"""The linear layers: joined base weights, adapters on top, and what the backward pass writes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.unit.engine.projections import base_projections
from tests.unit.engine.training.kit import CONFIG, QWEN2, decoder
from tinkex.engine.backends.torch.linear import Linear
from tinkex.engine.decoder import SHARED_INPUT
from tinkex.engine.lora import Segment, adapted_projections, initial, wrap
from tinkex.types import LoraConfig


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _adapter(rank: int, *, dtype: torch.dtype = torch.float64, **lora: bool):
    made = initial(CONFIG, LoraConfig(rank=rank, **lora), rank)
    flat_P = made.flat_P.to(dtype)
    return wrap(CONFIG, made.lora, flat_P + 0.1 * _random(*flat_P.shape, seed=rank, dtype=dtype))


def _room_for(weights):
    return wrap(weights.config, weights.lora, torch.full_like(weights.flat_P, torch.nan))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40])
def test_both_kinds_of_product_are_the_product(rows, batch_invariant):
    weight, bias, x = _random(70, 33), _random(70, seed=1), _random(rows, 33, seed=2)
    found = Linear(weight, bias).multiply(x, batch_invariant=batch_invariant)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (70, 33)])
def test_batch_invariant_rows_have_the_same_bits_whatever_their_number(shape):
    linear, x = Linear(_random(*shape)), _random(40, shape[1], seed=1)
    whole = linear.multiply(x, batch_invariant=True)
    for rows in (1, 2, 3, 5, 16, 17, 39):
        assert torch.equal(linear.multiply(x[:rows], batch_invariant=True), whole[:rows])
    assert torch.equal(linear.multiply(x[7:8], batch_invariant=True), whole[7:8])


def test_the_gradient_by_the_input_is_that_of_the_product():
    linear, x = Linear(_random(70, 33), _random(70, seed=1)), _random(20, 33, seed=2)
    gradient = _random(20, 70, seed=3)
    x.requires_grad_()
    F.linear(x, linear.weight_OI, linear.bias_O).backward(gradient)
    assert x.grad is not None
    torch.testing.assert_close(linear.input_gradient(gradient), x.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIG, QWEN2], ids=["plain", "biases"])
def test_joined_projections_are_views_of_one_tensor_and_equal_each_by_itself(config):
    made, x = decoder(config), _random(20, CONFIG.hidden_size)
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        found = base_projections(made)(1, names, x)
        assert len({one.untyped_storage().data_ptr() for one in found}) == 1
        for name, one in zip(names, found, strict=True):
            expected = F.linear(
                x, made.stored.layers[1].weights[name], made.stored.layers[1].biases.get(name)
            )
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)
        linear = made.linear(1, names)
        weight_OI, widths = linear.weight_OI, linear.widths
        for name, rows in zip(names, weight_OI.split(widths), strict=True):
            assert rows.data_ptr() == made.stored.layers[1].weights[name].data_ptr()


def test_an_adapters_factors_that_share_an_input_are_one_matrix():
    weights = _adapter(3)
    for names in SHARED_INPUT:
        group = weights.group(1, names)
        assert group is not None
        assert group.a_ZI.shape[0] == 3 * len(names)
        for number, name in enumerate(names):
            pair = weights.pair(1, name)
            assert pair is not None
            assert torch.equal(group.a_ZI[3 * number : 3 * number + 3], pair.a_RI)
            assert group.bs_OR[number].data_ptr() == pair.b_OR.data_ptr()
    assert _adapter(3, train_attn=False).group(1, ("o_proj",)) is None


def _segments(*, room: bool):
    one, two = _adapter(4), _adapter(7, train_attn=False)
    return [
        Segment(0, 5, one, _room_for(one) if room else None),
        Segment(5, 9, None),
        Segment(9, 20, two, _room_for(two) if room else None),
    ]


@pytest.mark.parametrize("names", SHARED_INPUT, ids="+".join)
def test_the_gradient_by_the_input_passes_gradcheck(names):
    made = decoder(CONFIG, torch.float64)
    project = adapted_projections(made, _segments(room=False))
    inputs = made.stored.layers[0].weights[names[0]].shape[1]
    x = _random(20, inputs, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: project(1, names, x), x)


@pytest.mark.parametrize("names", SHARED_INPUT, ids="+".join)
def test_the_backward_pass_writes_every_segments_gradient_and_nothing_else(names):
    made, segments = decoder(CONFIG, torch.float64), _segments(room=True)
    anchor = torch.zeros((), requires_grad=True)
    x = _random(20, made.stored.layers[0].weights[names[0]].shape[1], dtype=torch.float64)
    outputs = adapted_projections(made, segments, anchor=anchor)(1, names, x)
    gradients = [_random(*y.shape, seed=n, dtype=torch.float64) for n, y in enumerate(outputs)]
    torch.autograd.grad(outputs, anchor, gradients, allow_unused=True)
    for segment in (segments[0], segments[2]):
        assert segment.weights is not None
        assert segment.gradient is not None
        flat_P = segment.weights.flat_P.clone().requires_grad_()
        merged = wrap(CONFIG, segment.weights.lora, flat_P)
        rows = slice(segment.start, segment.stop)
        total = torch.zeros((), dtype=torch.float64)
        for name, gradient in zip(names, gradients, strict=True):
            pair = merged.pair(1, name)
            if pair is not None:
                y = merged.scale * x[rows] @ pair.a_RI.T @ pair.b_OR.T
                total = total + (y * gradient[rows]).sum()
        expected = torch.zeros_like(flat_P)
        if total.requires_grad:
            (expected,) = torch.autograd.grad(total, flat_P)
        written = ~segment.gradient.flat_P.isnan()
        covered = segment.weights.group(1, names) is not None
        assert bool(written.any()) is covered
        torch.testing.assert_close(segment.gradient.flat_P[written], expected[written])
        assert not expected[~written].any()


def test_without_gradients_the_layers_leave_no_trace_in_autograd():
    made = decoder(CONFIG, torch.float64)
    x = _random(20, CONFIG.hidden_size, dtype=torch.float64)
    outputs = adapted_projections(made, _segments(room=False))(1, ("gate_proj", "up_proj"), x)
    assert not any(one.requires_grad for one in outputs)
