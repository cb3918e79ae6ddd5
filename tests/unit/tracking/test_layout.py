"""Numbers and text for narrow lines."""

from __future__ import annotations

import math

import pytest

from tinkex.tracking.layout import as_many_as_fit, columns_of, cut, duration, number, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.2346"),
        (0, "0"),
        (0.0, "0.0000"),
        (7, "7"),
        (0.00012345, "0.000123"),
        (12345.6, "12,346"),
        (-2.5, "-2.5000"),
        (1e12, "1e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (151, "2:31"), (3723, "1:02:03"), (-5, "0:00"), (math.inf, "?")],
)
def test_times_read_like_a_stopwatch(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_sparkline_is_high_where_the_values_are():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8, unicode=True) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5], 8, unicode=True) == "▁▁"
    for hole in (math.nan, math.inf, 1e308):
        assert sparkline([1.0, hole, 2.0], 8, unicode=True) == "▁ █"
    assert len(sparkline([float(x) for x in range(1000)], 20, unicode=False)) == 20
    assert sparkline([1.0, 2.0], 8, unicode=False).isascii()
    assert sparkline([math.nan], 8, unicode=True) == sparkline([], 8, unicode=True) == ""


def test_wide_characters_take_two_columns_and_accents_none():
    assert columns_of("日本") == 4
    assert columns_of("e\u0301") == 1
    assert cut("日本語", 5) == "日本"
    assert cut("abc", 0) == cut("abc", -3) == ""


def test_control_characters_do_not_reach_the_terminal():
    assert cut("a\033[31mb\nc\a", 80) == "a [31mb c "


def test_what_does_not_fit_is_left_out_and_what_fits_after_it_is_not():
    assert as_many_as_fit(["one", "much too long", "two"], 10) == "one  two"
    assert as_many_as_fit(["one"], 2) == ""
