"""Draws: the generator, the filters, and frequencies against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.engine.backends.torch.cross_entropy import normalizers
from tinkex.engine.backends.torch.pick import (
    Draw,
    best,
    invert,
    philox,
    pick,
    scaled,
    seed_of,
    uniforms,
)

LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -3.0, 0.5, -0.5])


def exact(temperature: float, top_k: int = -1, top_p: float = 1.0) -> np.ndarray:
    """The distribution that the parameters describe, written without any of the code under test."""
    p = np.exp(LOGITS.double().numpy() / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass / total >= top_p:
            break
        kept.append(i)
        mass += p[i]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def draws(count: int, temperature: float, top_k: int = -1, top_p: float = 1.0) -> list[Draw]:
    numbers = uniforms(1234, 0, np.arange(count))
    return [Draw(temperature, top_k, top_p, float(u)) for u in numbers]


def test_philox_gives_the_words_its_authors_published() -> None:
    ones = 0xFFFFFFFF
    assert [hex(int(w)) for w in philox((0, 0, 0, 0), (0, 0))] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    assert [hex(int(w)) for w in philox((ones, ones, ones, ones), (ones, ones))] == [
        "0x408f276d",
        "0x41c83b0e",
        "0xa20bc7c6",
        "0x6d5451fd",
    ]
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert [hex(int(w)) for w in philox(counter, key)] == [
        "0xd16cfe09",
        "0x94fdcceb",
        "0x5001e420",
        "0x24126ea1",
    ]


@pytest.mark.req("B15")
def test_a_uniform_depends_on_its_own_seed_sample_position_and_draw_only() -> None:
    one = uniforms(7, 3, 11)
    many = uniforms(np.array([1, 7, 7], np.uint64), np.array([3, 3, 4]), np.array([11, 11, 11]))
    assert many[1] == one
    others = [uniforms(8, 3, 11), uniforms(7, 4, 11), uniforms(7, 3, 12), uniforms(7, 3, 11, 1)]
    assert len({float(one), *map(float, others)}) == 5


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    numbers = uniforms(99, np.arange(100)[:, None], np.arange(1000)).ravel()
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    # 99 degrees of freedom: a fair generator exceeds 149 with probability 0.001.
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 149


def test_seeds_cover_both_signed_and_unsigned_numbers_and_default_to_the_operation() -> None:
    assert seed_of(-1, "a") == 2**64 - 1 == seed_of(2**64 - 1, "b")
    assert seed_of(0, "a") == 0
    assert seed_of(None, "a") == seed_of(None, "a")
    assert seed_of(None, "a") != seed_of(None, "b")


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, -1, 1.0),
        (0.5, -1, 1.0),
        (2.0, -1, 1.0),
        (1.0, 3, 1.0),
        (1.0, -1, 0.8),
        (0.7, 5, 0.9),
        (1.3, 2, 0.5),
        (1.0, 0, 1.0),
    ],
)
def test_draws_follow_the_exact_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    count = 40_000
    rows = draws(count, temperature, top_k, top_p)
    found = pick(LOGITS.expand(count, -1), rows)
    counts = np.bincount(found.numpy(), minlength=len(LOGITS))
    expected = exact(temperature, top_k, top_p) * count
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    chi2 = ((counts[alive] - expected[alive]) ** 2 / expected[alive]).sum()
    # At most 7 degrees of freedom; 24.3 is exceeded by chance once in a thousand seeds.
    assert chi2 < 24.3


def test_a_wrong_temperature_would_be_noticed() -> None:
    count = 40_000
    found = pick(LOGITS.expand(count, -1), draws(count, 1.0))
    counts = np.bincount(found.numpy(), minlength=len(LOGITS))
    expected = exact(1.05) * count
    assert ((counts - expected) ** 2 / expected).sum() > 24.3


@pytest.mark.req("B15")
def test_temperature_zero_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 5.0, 5.0]])
    greedy = [Draw(0.0, -1, 1.0, 0.9)] * 2
    assert pick(logits, greedy).tolist() == [1, 1]


def test_greedy_and_warm_rows_share_a_batch_without_touching_each_other() -> None:
    mixed = [Draw(0.0, -1, 1.0, 0.0), *draws(3, 1.0), Draw(1.0, 2, 1.0, 0.99), Draw(0, 1, 0.1, 0)]
    together = pick(LOGITS.expand(6, -1), mixed)
    alone = torch.cat([pick(LOGITS[None], [draw]) for draw in mixed])
    assert torch.equal(together, alone)


def test_top_k_one_and_top_p_zero_are_greedy() -> None:
    rows = [Draw(1.0, 1, 1.0, u) for u in (0.0, 0.5, 0.999)]
    rows += [Draw(1.0, -1, 0.0, u) for u in (0.0, 0.5, 0.999)]
    assert pick(LOGITS.expand(6, -1), rows).tolist() == [0] * 6


def test_of_equal_tokens_at_the_edge_of_top_k_the_lower_ids_stay() -> None:
    logits = torch.zeros(1, 6)
    found = {int(pick(logits, [Draw(1.0, 2, 1.0, u)])) for u in np.linspace(0, 0.9999, 50)}
    assert found == {0, 1}


def test_top_k_above_the_vocabulary_keeps_everything() -> None:
    found = {int(pick(torch.zeros(1, 4), [Draw(1.0, 99, 1.0, u)])) for u in (0.1, 0.3, 0.6, 0.9)}
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("flat", [0.05, 5.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 0.9), (3000, 1.0), (2000, 0.6), (50, 0.99)])
def test_large_vocabularies_are_filtered_as_by_sorting_them(
    flat: float, top_k: int, top_p: float
) -> None:
    # With 5.0 few tokens make up top_p, with 0.05 it takes thousands.
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * flat
    logits = (logits * 16).round() / 16  # many are equal
    p = np.exp(logits[0].double().numpy())
    order = np.argsort(-p, kind="stable")[: top_k if top_k > 0 else None]
    before = np.cumsum(p[order]) - p[order]
    kept = np.sort(order[before < top_p * p[order].sum()] if top_p < 1 else order)
    share = p[kept] / p[kept].sum()
    # Numbers in the middle of a token's share, which rounding cannot move to its neighbour.
    middles = np.cumsum(share) - share / 2
    clear = np.flatnonzero(share > 1e-5)
    clear = clear[:: max(len(clear) // 300, 1)]
    rows = [Draw(1.0, top_k, top_p, float(u)) for u in middles[clear]]
    found = pick(logits.expand(len(rows), -1), rows)
    assert found.tolist() == kept[clear].tolist()


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_interval_give_tokens_that_can_be(u: float) -> None:
    impossible = -torch.inf
    row = torch.tensor([[impossible, 0.0, -1.0, impossible]])
    token = int(invert(row, torch.tensor([[u]], dtype=torch.float64)))
    assert token == (1 if u == 0.0 else 2)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6])
def test_a_temperature_near_zero_is_greedy_and_not_nan(temperature: float) -> None:
    assert int(pick(LOGITS[None], [Draw(temperature, -1, 1.0, 0.7)])) == 0


def test_a_huge_temperature_is_uniform() -> None:
    rows = [Draw(1e30, -1, 1.0, (i + 0.5) / 8) for i in range(8)]
    assert pick(LOGITS.expand(8, -1), rows).tolist() == list(range(8))


def test_rare_tokens_at_the_end_of_a_large_vocabulary_are_still_drawn() -> None:
    # 200,000 equal tokens of 5e-9 each behind one of 0.999: below float32's step next to 1.
    logits = torch.full((1, 200_001), float(np.log(5e-9)))
    logits[0, 0] = float(np.log(0.999))
    numbers = torch.linspace(0.9995, 0.99951, 1000, dtype=torch.float64)[None]
    found = invert(scaled(logits, [1.0]), numbers)
    assert found.unique().numel() == 1000


def test_the_best_tokens_come_with_log_probabilities_of_the_whole_distribution() -> None:
    ids, values = best(LOGITS[None], normalizers(LOGITS[None]), 3)
    reference = torch.log_softmax(LOGITS, -1)
    assert ids[0, 0] == 0
    assert set(ids[0].tolist()) == {0, 1, 2}
    assert torch.allclose(values[0], reference[ids[0]], atol=1e-6)
    assert best(LOGITS[None], normalizers(LOGITS[None]), 99)[0].shape == (1, 8)
