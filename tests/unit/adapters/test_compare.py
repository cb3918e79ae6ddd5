"""What counts as the same computation, and what does not."""

from __future__ import annotations

import math

import pytest

from tinkex.adapters.compare import OTHER_BASE, compare, known, mean_difference
from tinkex.errors import ResultError

BASE = [[-1.0, -2.0], [-3.0]]
ADAPTED = [[-0.5, -1.0], [-2.0]]


def moved(scores: list[list[float]], by: float) -> list[list[float]]:
    return [[value + by for value in text] for text in scores]


def test_equal_numbers_agree_and_say_what_the_adapter_does():
    found = compare(ADAPTED, BASE, ADAPTED, BASE)
    assert found.agrees
    assert (found.difference, found.base_difference, found.tokens) == (0.0, 0.0, 3)
    assert math.isclose(found.effect, 2.5 / 3)


def test_an_export_that_lost_its_adapter_does_not_agree():
    assert not compare(ADAPTED, BASE, BASE, BASE).agrees
    assert not compare(ADAPTED, BASE, BASE, BASE, rounded=True).agrees


def test_a_small_adapter_that_was_lost_does_not_agree_either():
    faint = moved(BASE, 0.01)
    assert not compare(faint, BASE, BASE, BASE, rounded=True).agrees
    assert compare(faint, BASE, moved(faint, 0.002), BASE, rounded=True).agrees
    assert not compare(faint, BASE, moved(faint, 0.002), BASE).agrees


def test_a_server_of_lower_precision_is_forgiven_what_its_base_model_shows():
    noisy = moved(BASE, 0.02)
    assert compare(moved(ADAPTED, 0.03), noisy, ADAPTED, BASE).agrees
    assert not compare(moved(ADAPTED, 0.2), noisy, ADAPTED, BASE).agrees


def test_another_base_model_is_told_from_noise():
    assert mean_difference(moved(BASE, 0.5), BASE) > OTHER_BASE > mean_difference(BASE, BASE)


@pytest.mark.parametrize("bad", [[[math.nan, -1.0], [-2.0]], [[-math.inf, -1.0], [-2.0]]])
def test_what_is_no_number_is_not_compared(bad: list[list[float]]):
    with pytest.raises(ResultError, match="no numbers"):
        compare(bad, BASE, ADAPTED, BASE)
    with pytest.raises(ResultError):
        compare([], [], [], [])


def test_the_first_token_has_no_logprob_and_a_hole_is_no_number():
    assert known([None, -1.0, -2.0]) == [-1.0, -2.0]
    assert math.isnan(known([None, None])[0])
    assert known(None) == []
