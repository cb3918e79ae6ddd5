"""Which curves a run has, and how they are smoothed."""

from __future__ import annotations

import math

import pytest

from tinkex.errors import InputError
from tinkex.tracking.series import by_panel, finite, is_evaluation, series_of, smoothed

ROWS = [
    {"step": 1, "time_s": 0.5, "loss": 3.0, "tokens": 8},
    {"step": 2, "time_s": 1.0, "loss": 2.0, "tokens": 8, "eval_loss": 2.5},
]


def test_a_run_is_shown_by_its_loss_and_evaluation_unless_asked_otherwise():
    assert series_of(ROWS) == {"loss": [(1, 3.0), (2, 2.0)], "eval_loss": [(2, 2.5)]}
    assert series_of(ROWS, ["tokens"]) == {"tokens": [(1, 8), (2, 8)]}


def test_a_run_with_a_reward_is_shown_by_it_too():
    assert list(series_of([{"step": 1, "reward": 0.5, "loss": 1.0}])) == ["loss", "reward"]


def test_a_run_without_the_usual_numbers_is_shown_by_its_first():
    assert series_of([{"step": 1, "time_s": 1.0, "perplexity": 9.0, "other": 1.0}]) == {
        "perplexity": [(1, 9.0)]
    }
    assert series_of([]) == {}


def test_a_metric_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InputError, match="no metric 'reward'; there are loss, tokens, eval_loss"):
        series_of(ROWS, ["reward"])
    with pytest.raises(InputError, match="there are none"):
        series_of([], ["loss"])


def test_a_label_says_whose_it_is_and_changes_nothing_else():
    labelled = series_of(ROWS, label="a: b")
    assert list(labelled) == ["a: b: loss", "a: b: eval_loss"]
    assert by_panel(labelled) == {"loss": labelled}
    assert [is_evaluation(name) for name in labelled] == [False, True]


def test_a_loss_and_a_reward_share_no_axis():
    panels = by_panel({"loss": [(1, 2.0)], "reward": [(1, 0.1)], "eval_reward": [(1, 0.2)]})
    assert {panel: list(inside) for panel, inside in panels.items()} == {
        "loss": ["loss"],
        "reward": ["reward", "eval_reward"],
    }


def test_what_cannot_be_drawn_is_left_out():
    points = [(1, math.nan), (2, math.inf), (3, 1.0), (math.nan, 1.0)]
    assert finite(points) == [(3, 1.0)]


def test_smoothing_keeps_a_straight_line_the_beginning_and_the_number_of_points():
    noisy = [(float(x), 5.0 + (-1) ** x) for x in range(100)]
    smooth = smoothed(noisy)
    assert smooth[0] == noisy[0]
    assert [x for x, _ in smooth] == [x for x, _ in noisy]
    assert max(abs(y - 5.0) for _, y in smooth[5:]) < 0.2
    flat = [(float(x), 2.0) for x in range(50)]
    assert smoothed(flat) == flat
    assert smoothed([]) == []
