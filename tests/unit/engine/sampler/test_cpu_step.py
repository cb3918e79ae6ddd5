"""Decoding written out for a CPU has the bits of the families' own definition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.engine.training.kit import CONFIG, QWEN, QWEN2, decoder
from tinkex.engine.attention import PagedAttention, Span, new_cache
from tinkex.engine.lora import adapted_projections, initial
from tinkex.engine.sampler import BASE, LoraAdapters
from tinkex.engine.sampler.cpu_step import CpuSteps, cpu_steps
from tinkex.engine.sampler.runner import NoAdapters, Segment
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import Decoder, DecoderConfig

BLOCK = 4
# Weights that are too large to be multiplied plainly: see `models/linear.py`.
LARGE = replace(CONFIG, hidden_size=640, intermediate_size=800, num_heads=8, head_dim=80)
FAMILIES = {"llama": CONFIG, "qwen2": QWEN2, "qwen3": QWEN, "large": LARGE}


class Bench:
    """A model, two equal caches with some keys in them, and two adapters."""

    def __init__(self, config: DecoderConfig) -> None:
        self.decoder: Decoder = decoder(replace(config, max_context=512))
        self.cache = new_cache(self.decoder.config, 96 * BLOCK, self.decoder.unembed_VD)
        self.cache.copy_(torch.randn(self.cache.shape, generator=torch.Generator().manual_seed(1)))
        self.expected_cache = self.cache.clone()
        self.versions = {name: self._weights(rank) for name, rank in (("r3", 3), ("r16", 16))}
        self.adapters = LoraAdapters(self.decoder, self.versions.get)
        self.steps = cpu_steps(self.decoder, self.adapters, self.cache, block_size=BLOCK)
        assert isinstance(self.steps, CpuSteps)

    def _weights(self, rank: int) -> LoraWeights:
        made = initial(self.decoder.config, LoraConfig(rank=rank, seed=rank), rank)
        generator = torch.Generator().manual_seed(rank)
        made.flat_P.copy_(torch.randn(made.flat_P.shape, generator=generator) / 30)
        return made

    def step(self, tokens: list[int], spans: list[Span], segments: list[Segment]) -> Tensor:
        assert self.steps is not None
        assert self.steps.suits(spans)
        return self.steps.hidden(tokens, spans, segments)

    @torch.no_grad()
    def expected(self, tokens: list[int], spans: list[Span], segments: list[Segment]) -> Tensor:
        found = self.adapters.segments(segments)
        return self.decoder.hidden(
            torch.tensor(tokens),
            torch.tensor([span.start for span in spans]),
            PagedAttention(self.expected_cache, spans, block_size=BLOCK),
            adapted_projections(self.decoder, found, packed=True),
        )


def spans_at(starts: list[int]) -> list[Span]:
    """Sequences of these lengths, in blocks of their own that lie in no order."""
    free = [int(block) for block in np.random.default_rng(3).permutation(96)]
    return [Span(s, s + 1, [free.pop() for _ in range(s // BLOCK + 1)]) for s in starts]


def later(spans: list[Span]) -> list[Span]:
    """The next token of each, where that begins no block."""
    return [Span(s.stop, s.stop + 1, s.blocks) for s in spans]


def halves(count: int, first: str, second: str) -> list[Segment]:
    middle = count // 2
    return [Segment(first, 0, middle), Segment(second, middle, count)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("starts", [[5], [4, 41, 130], [8, 9, 10, 12, 13], [0] * 18])
@pytest.mark.parametrize("version", [BASE, "r16"])
def test_steps_have_the_bits_of_the_plain_definition(
    name: str, starts: list[int], version: str
) -> None:
    bench = Bench(FAMILIES[name])
    spans, segments = spans_at(starts), [Segment(version, 0, len(starts))]
    for number in range(2):
        tokens = [number + token for token in range(len(starts))]
        found = bench.step(tokens, spans, segments).clone()
        assert torch.equal(found, bench.expected(tokens, spans, segments))
        assert torch.equal(bench.cache, bench.expected_cache)
        spans = later(spans)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_many_versions_each_have_their_own_adapter(name: str) -> None:
    bench = Bench(FAMILIES[name])
    spans, tokens = spans_at([5, 6, 21, 40, 9]), [1, 2, 3, 4, 5]
    segments = [*halves(4, "r3", BASE), Segment("r16", 4, 5)]
    found = bench.step(tokens, spans, segments).clone()
    assert torch.equal(found, bench.expected(tokens, spans, segments))


def test_sequences_that_come_go_or_grow_are_noticed() -> None:
    bench = Bench(CONFIG)
    first, second = spans_at([5, 9])
    segments = [Segment(BASE, 0, 2)]
    steps = [
        [first, second],
        [second, first],  # in another order
        [Span(8, 9, [*first.blocks, 90]), Span(12, 13, [*second.blocks, 91])],  # a block more
        [first, Span(1, 2, [92])],  # another sequence
        [Span(7, 8, first.blocks), Span(3, 4, [92])],  # some tokens later
    ]
    for spans in steps:
        found = bench.step([1, 2], spans, segments).clone()
        assert torch.equal(found, bench.expected([1, 2], spans, segments))


def test_a_nan_that_another_sequence_left_in_a_fresh_block_is_wiped() -> None:
    bench = Bench(CONFIG)
    (span,) = spans_at([8])
    slots = slice(span.blocks[2] * BLOCK, (span.blocks[2] + 1) * BLOCK)
    bench.cache[:, :, :, slots] = torch.nan
    assert bool(bench.step([1], [span], [Segment(BASE, 0, 1)]).isfinite().all())


def test_long_contexts_and_prompts_are_left_to_the_usual_way() -> None:
    bench = Bench(CONFIG)
    assert bench.steps is not None
    assert bench.steps.suits([Span(3, 4, [0])])
    assert not bench.steps.suits([Span(3, 5, [0, 1])])
    assert not bench.steps.suits([Span(0, 1, list(range(2**20)))])


def test_other_adapters_and_precisions_are_left_to_the_usual_way() -> None:
    bench = Bench(CONFIG)
    unknown = NoAdapters(bench.decoder)
    assert cpu_steps(bench.decoder, unknown, bench.cache, block_size=BLOCK) is None
    double = bench.cache.double()
    assert cpu_steps(bench.decoder, bench.adapters, double, block_size=BLOCK) is None
