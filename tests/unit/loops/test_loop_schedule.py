"""Rates, batches and seeds are functions of the settings and the step alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.loops.schedule import batch, held_out, learning_rate, sampling_seed, steps_of

sizes = st.integers(1, 9)
examples = st.integers(1, 40)
seeds = st.integers(0, 5)


@given(size=sizes, count=examples, seed=seeds, epochs=st.integers(1, 3))
def test_every_epoch_has_each_example_once(size: int, count: int, seed: int, epochs: int):
    steps = steps_of(epochs, size, count)
    seen = [i for step in range(1, steps + 1) for i in batch(step, size, count, seed)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert 0 <= len(seen) - epochs * count < size


def test_a_batch_does_not_depend_on_what_was_asked_before():
    forwards = [batch(step, 4, 10, seed=3) for step in range(1, 9)]
    backwards = [batch(step, 4, 10, seed=3) for step in range(8, 0, -1)]
    assert forwards == backwards[::-1]


def test_epochs_and_seeds_have_orders_of_their_own():
    assert batch(1, 20, 20, seed=1) != batch(2, 20, 20, seed=1)
    assert batch(1, 20, 20, seed=1) != batch(1, 20, 20, seed=2)


def test_the_order_is_the_same_in_every_process():
    assert batch(1, 6, 6, seed=0) == [0, 5, 1, 4, 3, 2]


@given(count=st.integers(2, 50), fraction=st.floats(0.001, 0.999), seed=seeds)
def test_something_is_held_out_and_something_is_left(count: int, fraction: float, seed: int):
    assert 1 <= len(held_out(count, fraction, seed)) < count


def test_every_prompt_of_every_step_has_a_seed_of_its_own():
    found = Counter(
        sampling_seed(seed, step, prompt)
        for seed in range(4)
        for step in range(10)
        for prompt in range(10)
    )
    assert len(found) == 400
    assert all(0 <= seed < 2**63 for seed in found)


def test_a_constant_rate_stays_the_same():
    assert {learning_rate(step, 10, 0.5, "constant", 0) for step in range(1, 11)} == {0.5}


def test_the_linear_rate_falls_by_equal_amounts_and_is_never_zero():
    rates = [learning_rate(step, 4, 0.8, "linear", 0) for step in range(1, 5)]
    assert rates == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_the_cosine_rate_begins_at_the_peak_and_passes_the_middle_half_way():
    rates = [learning_rate(step, 10, 1.0, "cosine", 0) for step in range(1, 11)]
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_rises_during_warmup_and_then_is_the_peak(schedule: str):
    rates = [learning_rate(step, 10, 1.0, schedule, 3) for step in range(1, 5)]  # pyright: ignore[reportArgumentType] - parametrized
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])
