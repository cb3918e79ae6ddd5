"""Decoding written out for a CPU has the bits of the families' own definition."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.engine.sampler.kit import BaseOnly, op, sample, sampler, text
from tests.unit.engine.training.kit import CONFIG, QWEN, QWEN2, decoder
from tinkex.engine.attention import PackedAttention, PagedAttention, Span, new_cache
from tinkex.engine.lora import adapted_projections, initial
from tinkex.engine.models.base import base_projections, plainly
from tinkex.engine.models.families import FAMILIES as FAMILY_TABLE
from tinkex.engine.models.layers import (
    Rotation,
    rms_norm,
    rotated_heads,
    rotation,
    split_heads,
    swiglu,
)
from tinkex.engine.models.llama import Llama
from tinkex.engine.sampler import BASE, LoraAdapters
from tinkex.engine.sampler.cpu_step import CpuSteps, cpu_steps
from tinkex.engine.sampler.runner import Segment
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import Attend, Decoder, DecoderConfig, Project, RunBlock

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
        return self.steps.hidden(tokens, spans, segments)[: len(tokens)]

    @torch.no_grad()
    def expected(self, tokens: list[int], spans: list[Span], segments: list[Segment]) -> Tensor:
        found = self.adapters.segments(segments)
        return self.decoder.hidden(
            torch.tensor(tokens),
            torch.tensor([place for span in spans for place in range(span.start, span.stop)]),
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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("version", [BASE, "r3"])
def test_short_prompts_have_the_bits_of_the_plain_definition(name: str, version: str) -> None:
    bench = Bench(FAMILIES[name])
    spans = [Span(0, 9, [5, 6, 7]), Span(6, 7, [1, 2]), Span(3, 6, [8, 9]), Span(0, 1, [3])]
    tokens = list(range(14))
    segments = [Segment(version, 0, 10), Segment("r16", 10, 14)]
    found = bench.step(tokens, spans, segments).clone()
    assert torch.equal(found, bench.expected(tokens, spans, segments))
    assert torch.equal(bench.cache, bench.expected_cache)


def test_sequences_of_different_lengths_go_on_for_many_blocks() -> None:
    bench = Bench(CONFIG)
    free = [int(block) for block in np.random.default_rng(3).permutation(96)]
    blocks: list[list[int]] = [[free.pop() for _ in range(count)] for count in (0, 2, 8)]
    segments = [Segment(BASE, 0, 3)]
    for number in range(90):
        starts = [number, 6 + number, 29 + number]
        for taken, start in zip(blocks, starts, strict=True):
            if start == len(taken) * BLOCK:
                taken.append(free.pop())
        spans = [Span(s, s + 1, taken) for s, taken in zip(starts, blocks, strict=True)]
        spans.sort(key=lambda span: span.shape)
        found = bench.step([number, 1, 2], spans, segments)
        assert torch.equal(found, bench.expected([number, 1, 2], spans, segments))
    assert torch.equal(bench.cache, bench.expected_cache)


def test_many_tokens_are_left_to_the_usual_way() -> None:
    bench = Bench(CONFIG)
    assert bench.steps is not None
    lone, prompt = Span(3, 4, [0]), Span(0, 40, list(range(10)))
    assert bench.steps.suits([lone] * 100)
    assert bench.steps.suits([prompt, lone])
    assert not bench.steps.suits([prompt, prompt])
    assert not bench.steps.suits([Span(0, 1, list(range(2**20)))] * 100)


class MadeUp(Llama):
    """A family that differs from Llama in one thing, inherits its tensors and declares no form."""

    embedding_scale = 1.0

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        project: Project,
        run_block: RunBlock = plainly,
    ) -> Tensor:
        rotate = rotation(positions_T, self.frequencies_F)
        h_TD = F.embedding(tokens_T, self.stored.embed_VD) * self.embedding_scale
        for layer in range(self.config.num_layers):
            h_TD = run_block(partial(self._block, layer, rotate, attend, project), h_TD)
        return rms_norm(h_TD, self.stored.final_norm_D, self.config.rms_eps)

    def _block(
        self, layer: int, rotate: Rotation, attend: Attend, project: Project, h_TD: Tensor
    ) -> Tensor:
        weights, eps = self.stored.layers[layer], self.config.rms_eps
        x_TD = rms_norm(h_TD, weights.input_norm_D, eps)
        q_TX, k_TY, v_TY = project(layer, ("q_proj", "k_proj", "v_proj"), x_TD)
        q_THd, k_TGd = rotated_heads(q_TX, k_TY, rotate)
        o_TX = attend(layer, q_THd, k_TGd, split_heads(v_TY, self.config.head_dim))
        h_TD = h_TD + self.after_attention(project(layer, ("o_proj",), o_TX)[0], layer)
        x_TD = rms_norm(h_TD, weights.post_attention_norm_D, eps)
        gate_TM, up_TM = project(layer, ("gate_proj", "up_proj"), x_TD)
        return h_TD + project(layer, ("down_proj",), self.gated(gate_TM, up_TM))[0]

    def after_attention(self, o_TD: Tensor, layer: int) -> Tensor:
        return o_TD

    def gated(self, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        return swiglu(gate_TM, up_TM)


class ScaledEmbeddings(MadeUp):
    embedding_scale = 5.5


class OtherActivation(MadeUp):
    def gated(self, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        return F.gelu(gate_TM) * up_TM


class ExtraNorm(MadeUp):
    def after_attention(self, o_TD: Tensor, layer: int) -> Tensor:
        norm_D = self.stored.layers[layer].input_norm_D
        return rms_norm(o_TD, norm_D, self.config.rms_eps)


class OneLayerWithoutPositions(MadeUp):
    """Only the last layer differs."""

    def _block(
        self, layer: int, rotate: Rotation, attend: Attend, project: Project, h_TD: Tensor
    ) -> Tensor:
        if layer == self.config.num_layers - 1:
            rotate = Rotation(torch.ones_like(rotate.cos_T1F), torch.zeros_like(rotate.sin_T1F))
        return super()._block(layer, rotate, attend, project, h_TD)


MADE_UP = [ScaledEmbeddings, OtherActivation, ExtraNorm, OneLayerWithoutPositions]


@pytest.mark.parametrize("declares", [False, True], ids=["undeclared", "declared wrongly"])
@pytest.mark.parametrize("made_up", MADE_UP)
def test_a_family_with_another_block_is_sampled_by_its_own_definition(
    made_up: type[MadeUp], declares: bool
) -> None:
    family = type("Family", (made_up,), {"form": Llama.form} if declares else {})
    made = family(CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    for (_, slot), (_, value) in zip(made.stored.named(), decoder().stored.named(), strict=True):
        slot.copy_(value)
    prompt = [token % CONFIG.vocab_size for token in text(24)]
    result = sample(
        sampler(decoder=made), op(prompt, max_tokens=6, extra={"prompt_logprobs": True})
    )
    (drawn,) = result.response.sequences
    found = [*result.response.prompt_logprobs[1:], *drawn.logprobs]
    tokens = torch.tensor([*prompt, *drawn.tokens])
    with torch.no_grad():
        h_TD = made.hidden(
            tokens,
            torch.arange(len(tokens)),
            PackedAttention([len(tokens)], tokens.device),
            base_projections(made, packed=True),
        )
    expected = F.log_softmax(h_TD @ made.unembed_VD.T, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_subclass_does_not_inherit_the_form_and_every_family_declares_its_own() -> None:
    assert type("Family", (Llama,), {}).own_form() is None
    assert all(family.own_form() is not None for family in FAMILY_TABLE)


def test_tensors_that_a_family_does_not_use_are_not_used_for_it() -> None:
    config = replace(CONFIG, qk_norm=True)  # Llama's block has no norms of heads
    bench = Bench(CONFIG)
    assert cpu_steps(decoder(config), bench.adapters, bench.cache, block_size=BLOCK) is None


def test_steps_that_are_not_used_are_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = type("Family", (ExtraNorm,), {"form": Llama.form})
    bench = Bench(CONFIG)
    with caplog.at_level(logging.INFO, "tinkex"):
        for _ in range(2):
            made = family(CONFIG, dtype=torch.float32, device=torch.device("cpu"))
            assert cpu_steps(made, bench.adapters, bench.cache, block_size=BLOCK) is None
    (line,) = caplog.messages
    assert "LlamaForCausalLM is sampled by its plain definition" in line


def test_other_adapters_and_precisions_are_left_to_the_usual_way() -> None:
    bench = Bench(CONFIG)
    unknown = BaseOnly(bench.decoder)
    assert cpu_steps(bench.decoder, unknown, bench.cache, block_size=BLOCK) is None
    double = bench.cache.double()
    assert cpu_steps(bench.decoder, bench.adapters, double, block_size=BLOCK) is None
