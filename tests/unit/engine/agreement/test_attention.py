"""Both attentions against torch's own, and against each other to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tinkex.engine.attention.invariant import mix, scores
from tinkex.engine.attention.packed import PackedAttention
from tinkex.engine.attention.paged import PagedAttention, TokenSpan

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = [(9, 3, 64), (4, 4, 8), (4, 2, 32), (5, 1, 12)]
"""Heads, key heads and head sizes."""
LENGTHS = [1, 16, 70, 3, 70, 129, 2]


def qkv(count: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32):
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randn(count, n, dim, generator=generator, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts: list[Tensor] = []
    for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in one)
        o = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        parts.append(o[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pack_equals_torchs_attention_sequence_by_sequence(shape) -> None:
    q, k, v = qkv(sum(LENGTHS), shape)
    found = PackedAttention(LENGTHS)(0, q, k, v)
    # float32 sums in another order.
    torch.testing.assert_close(found, reference(q, k, v, LENGTHS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_its_gradients_equal_torchs_in_float64(shape) -> None:
    inputs = [x.requires_grad_() for x in qkv(sum(LENGTHS), shape, torch.float64)]
    heads, _, dim = shape
    gradient = torch.randn(sum(LENGTHS), heads * dim, dtype=torch.float64)
    found = torch.autograd.grad(PackedAttention(LENGTHS)(0, *inputs), inputs, gradient)
    wanted = torch.autograd.grad(reference(*inputs, LENGTHS), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_has_the_same_bits_and_gradients_in_any_pack(shape) -> None:
    q, k, v = qkv(70, shape)
    gradient = torch.randn(70, shape[0] * shape[2])

    def run(lengths: list[int], place: int) -> list[Tensor]:
        """The output and gradients of the 70 tokens, after `place` others."""
        count = sum(lengths)
        inputs = [x.clone() for x in qkv(count, shape)]
        for whole, own in zip(inputs, (q, k, v), strict=True):
            whole[place : place + 70] = own
            whole.requires_grad_()
        gradients = torch.randn(count, gradient.shape[1])
        gradients[place : place + 70] = gradient
        o = PackedAttention(lengths)(0, *inputs)
        found = [o.detach(), *torch.autograd.grad(o, inputs, gradients)]
        return [x[place : place + 70] for x in found]

    alone = run([70], 0)
    for lengths, place in (([3, 70, 70, 1], 3), ([3, 70, 70, 1], 73), ([200, 70], 200)):
        for one, other in zip(run(lengths, place), alone, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("block_size", [3, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_reading_from_the_cache_has_the_bits_of_a_pack(shape, block_size) -> None:
    rng = np.random.default_rng(block_size)
    heads, kv_heads, dim = shape
    lengths = [150, 37, 1, 90]
    blocks = _blocks(rng, lengths, block_size)
    cache = torch.full((2, 1, kv_heads, 200 * block_size, dim), torch.nan)
    inputs = [qkv(200 + number, shape) for number in range(len(lengths))]
    found = [torch.full((length, heads * dim), torch.nan) for length in lengths]
    done = [0] * len(lengths)
    while done != lengths:
        # A few tokens of each that has some left, often only one.
        steps = [
            min(left, int(rng.choice([1, 1, 5, 64])))
            for left in (length - at for length, at in zip(lengths, done, strict=True))
        ]
        chosen = [i for i in rng.permutation(len(lengths)) if steps[i]]
        spans = [
            TokenSpan(
                done[i], done[i] + steps[i], blocks[i][: -(-(done[i] + steps[i]) // block_size)]
            )
            for i in chosen
        ]
        attend = PagedAttention(cache, spans, block_size=block_size)
        parts = [[x[done[i] : done[i] + steps[i]] for x in inputs[i]] for i in chosen]
        o = attend(0, *(torch.cat(column) for column in zip(*parts, strict=True)))
        for i, rows in zip(chosen, o.split([steps[i] for i in chosen]), strict=True):
            found[i][done[i] : done[i] + steps[i]] = rows
            done[i] += steps[i]
    for own, rows, length in zip(inputs, found, lengths, strict=True):
        assert torch.equal(rows, PackedAttention([length])(0, *(x[:length] for x in own)))


def _blocks(rng: np.random.Generator, lengths: list[int], size: int) -> list[list[int]]:
    free = [int(block) for block in rng.permutation(200)]
    return [[free.pop() for _ in range(-(-length // size))] for length in lengths]


def test_what_would_break_the_promise_is_refused() -> None:
    with pytest.raises(AssertionError, match="query rows"):
        scores(torch.zeros(1, 3, 8), torch.zeros(1, 16, 8))
    with pytest.raises(AssertionError, match="not padded"):
        scores(torch.zeros(1, 4, 8), torch.zeros(1, 17, 8))


def test_masked_keys_add_exactly_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 4, 48, generator=generator)
    values = torch.randn(2, 48, 8, generator=generator)
    padded = torch.zeros(2, 4, 400), torch.randn(2, 400, 8, generator=generator)
    padded[0][:, :, :48], padded[1][:, :48] = weights, values
    assert torch.equal(mix(weights, values), mix(*padded))
