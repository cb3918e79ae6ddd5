"""Segments that are alike are computed together, and nobody can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG, add, datum, op, run, trainer
from tinkex.engine.lora import Segment, initial, wrap
from tinkex.engine.lora.pieces import piece_of
from tinkex.engine.lora.stacks import stack_of, stacked
from tinkex.engine.models.base import SHARED_INPUT
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import DecoderConfig

SMOLLM2 = replace(
    CONFIG, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
)
# Shapes that fit no vector and no tile.
ODD = replace(
    CONFIG, hidden_size=36, intermediate_size=50, num_heads=3, num_kv_heads=1, head_dim=12
)


@pytest.fixture(autouse=True)
def threads_as_before() -> Generator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapter(seed: int, rank: int = 16, config: DecoderConfig = CONFIG, **lora: bool) -> LoraWeights:
    made = initial(config, LoraConfig(rank=rank, **lora), seed)
    return wrap(config, made.lora, made.flat_P + 0.1 * random(len(made.flat_P), seed=seed))


def room_for(weights: LoraWeights) -> LoraWeights:
    return wrap(weights.config, weights.lora, torch.full_like(weights.flat_P, torch.nan))


def segments(count: int, tokens: int, rank: int, config: DecoderConfig) -> list[Segment]:
    adapters = [adapter(seed, rank, config) for seed in range(count)]
    return [
        Segment(tokens * number, tokens * (number + 1), weights, room_for(weights))
        for number, weights in enumerate(adapters)
    ]


def in_double(weights: LoraWeights) -> LoraWeights:
    return wrap(weights.config, weights.lora, weights.flat_P.double())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("tokens", "rank"), [(16, 16), (64, 32), (80, 17), (256, 100)])
@pytest.mark.parametrize("config", [CONFIG, SMOLLM2, ODD], ids=["small", "smollm2", "odd"])
def test_a_stack_has_the_bits_of_each_segment_alone(config, tokens, rank, threads):
    torch.set_num_threads(threads)
    together = segments(3, tokens, rank, config)
    apart = [replace(one, gradient=room_for(one.gradient)) for one in together]
    rows = 3 * tokens
    for names in SHARED_INPUT:
        stack = stack_of(together, 1, names)
        pieces = [piece_of(segment, 1, names) for segment in apart]
        assert stack is not None
        inputs = stack.factors[0].a_ZI.shape[1]
        outputs = sum(b_OR.shape[0] for b_OR in stack.factors[0].bs_OR)
        x, dy = random(rows, inputs, seed=1), random(rows, outputs, seed=2)
        y, dx = random(rows, outputs, seed=3), random(rows, inputs, seed=4)
        wanted_y, wanted_dx = y.clone(), dx.clone()
        stack.back(x, dy, stack.add(x, y), dx)
        for piece in pieces:
            assert piece is not None
            piece.back(x, dy, piece.add(x, wanted_y), wanted_dx)
        assert torch.equal(y, wanted_y)
        assert torch.equal(dx, wanted_dx)
    for one, other in zip(together, apart, strict=True):
        assert one.gradient is not None
        assert other.gradient is not None
        found, wanted = one.gradient.flat_P, other.gradient.flat_P
        assert torch.equal(found.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
        assert 0.4 < found.isnan().float().mean() < 0.8  # the other layer, and the unembedding


def test_neighbours_that_are_alike_are_together():
    alike = segments(3, 32, 16, CONFIG)
    assert stacked(alike) == [alike]


def test_a_stack_has_a_bound():
    alike = segments(19, 16, 16, CONFIG)
    assert [len(run) for run in stacked(alike)] == [8, 8, 3]
    assert [segment for run in stacked(alike) for segment in run] == alike


@pytest.mark.parametrize(
    "second",
    [
        Segment(32, 80, adapter(2)),
        Segment(32, 64, adapter(2, 32)),
        Segment(32, 64, adapter(2, train_mlp=False)),
        Segment(32, 64, adapter(2), room_for(adapter(2))),
        Segment(32, 64, None),
        Segment(48, 80, adapter(2)),
    ],
    ids=["longer", "rank", "covers less", "learns", "base model", "gap"],
)
def test_segments_that_differ_stay_apart(second):
    both = [Segment(0, 32, adapter(1)), second]
    assert stacked(both) == [[segment] for segment in both]


@pytest.mark.parametrize(
    ("tokens", "rank"), [(40, 16), (32, 15), (272, 16)], ids=["rows", "rank", "long"]
)
def test_products_of_other_kernels_stay_apart(tokens, rank):
    both = segments(2, tokens, rank, CONFIG)
    assert stacked(both) == [[segment] for segment in both]


def test_other_precisions_stay_apart():
    both = segments(2, 32, 16, CONFIG)
    exact = [replace(one, weights=in_double(one.weights)) for one in both]
    learning = [replace(one, gradient=in_double(one.gradient)) for one in both]
    for wanted in (exact, learning):
        assert stacked(wanted) == [[segment] for segment in wanted]


def test_more_threads_than_were_tried_compute_each_alone():
    both = segments(2, 32, 16, CONFIG)
    torch.set_num_threads(3)
    assert stacked(both) == [[segment] for segment in both]


def test_an_operation_among_its_like_learns_the_same_bits_as_alone():
    ids = [f"model-{number}" for number in range(4)]
    found: list[list[Tensor]] = []
    for batches in ([ids], [[model_id] for model_id in ids]):
        made = trainer()
        for number, model_id in enumerate(ids):
            add(made, model_id, 16, seed=number)
        for batch in batches:
            run(made, *(op(model_id, [datum(32, ids.index(model_id))]) for model_id in batch))
        gradients = [made.adapters[model_id].gradient_P for model_id in ids]
        found.append([gradient_P for gradient_P in gradients if gradient_P is not None])
    together, alone = found
    assert len(together) == len(alone) == 4
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
        assert bool(one.any())
