"""Low-rank products of many segments in one call: the same numbers as one by one."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG, decoder
from tinkex.engine.lora import (
    Segment,
    adapted_in_place,
    adapted_projections,
    initial,
    layers,
    thin,
    wrap,
)
from tinkex.engine.models.base import SHARED_INPUT
from tinkex.types import LoraConfig

ROWS = 40


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _segments(*, room: bool) -> list[Segment]:
    """Adapters of different ranks, one of which covers only a part, and rows of the base model."""
    found = []
    for start, stop, rank, attn in ((0, 5, 16, True), (9, 26, 48, False), (26, ROWS, 32, True)):
        made = initial(CONFIG, LoraConfig(rank=rank, train_attn=attn), rank)
        moved = made.flat_P + 0.1 * _random(*made.flat_P.shape, seed=rank)
        weights = wrap(CONFIG, made.lora, moved)
        place = wrap(CONFIG, made.lora, torch.full_like(moved, torch.nan)) if room else None
        found.append(Segment(start, stop, weights, place))
    return [found[0], Segment(5, 9, None), *found[1:]]


def _slopes(names: tuple, x: torch.Tensor):
    """Outputs, the slope by the input, and all gradients."""
    segments = _segments(room=True)
    x = x.clone().requires_grad_()
    anchor = torch.zeros((), requires_grad=True)
    outputs = adapted_projections(decoder(), segments, anchor=anchor, packed=True)(1, names, x)
    slopes = [_random(*y.shape, seed=n) for n, y in enumerate(outputs)]
    (dx, _) = torch.autograd.grad(outputs, (x, anchor), slopes, allow_unused=True)
    gradients = [s.gradient.flat_P for s in segments if s.gradient is not None]
    return [y.detach() for y in outputs], dx, gradients


@pytest.mark.parametrize("names", SHARED_INPUT, ids="+".join)
def test_together_is_what_torch_computes_one_by_one(
    names: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _random(ROWS, decoder().weight(0, names[0]).shape[1], seed=9)
    outputs, dx, gradients = _slopes(names, x)
    monkeypatch.setattr(layers, "goes_together", lambda piece: False)
    monkeypatch.setattr(thin, "suits", lambda factor: False)
    others, other_dx, other_gradients = _slopes(names, x)
    for found, expected in zip((*outputs, dx), (*others, other_dx), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not all(found.isnan().all() for found in gradients)
    for found, expected in zip(gradients, other_gradients, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("names", SHARED_INPUT, ids="+".join)
def test_training_and_decoding_get_the_same_bits(names: tuple) -> None:
    made, segments = decoder(), _segments(room=False)
    x = _random(ROWS, made.weight(0, names[0]).shape[1], seed=9)
    trained = torch.cat(adapted_projections(made, segments, packed=True)(1, names, x), dim=1)
    adapt = adapted_in_place(segments)
    assert adapt is not None
    decoded = made.linear(1, names).multiply(x, packed=True)
    adapt(1, names, x, decoded)
    assert torch.equal(trained, decoded)
