"""Retries happen on a thread of their own and must not change what a program draws."""

from __future__ import annotations

import random

from tinkex.transport.retry import random_share


def test_jitter_leaves_the_random_numbers_of_a_program_alone():
    random.seed(7)
    expected = random.random()
    random.seed(7)
    assert 0.0 <= random_share() <= 1.0
    assert random.random() == expected
