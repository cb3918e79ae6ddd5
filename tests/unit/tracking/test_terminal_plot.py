"""Plots as text: what is drawn where, and that no size and no number breaks them."""

from __future__ import annotations

import math
import re

import pytest

from tinkex.tracking.layout import columns_of
from tinkex.tracking.terminal_plot import plot

FALLING = [(float(step), 4.0 - 3.0 * step / 99) for step in range(100)]


def test_a_small_plot_looks_like_this():
    drawn = plot({"loss": FALLING[::33], "eval_loss": [(66.0, 3.9)]}, 30, 8, False)
    assert drawn.splitlines() == [
        "        * loss   o eval loss",
        "4.0000 |****          o",
        "       |    *****",
        "2.5000 |         ****",
        "       |             *****",
        "1.0000 |                  ****",
        "       +----------------------",
        "        0       step        99",
    ]


def test_a_line_is_drawn_in_dots_and_evaluations_as_marks():
    drawn = plot({"loss": FALLING, "eval_loss": [(50.0, 3.5)]}, 80, 20, True)
    body = "\n".join(drawn.splitlines()[1:])
    assert re.search("[⠁-⣿]{3}", body)
    assert body.count("◆") == 1


def test_the_line_falls_from_the_top_left_to_the_bottom_right():
    rows = plot({"loss": FALLING}, 60, 14, True).splitlines()[1:-2]
    starts = [re.search("[⠁-⣿]", row).start() for row in rows]  # pyright: ignore[reportOptionalMemberAccess] - every row has dots
    assert starts == sorted(starts)
    assert rows[0].startswith("4.0000 ┤")
    assert rows[-1].startswith("1.0000 ┤")


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [0, 1, 2, 10, 23, 24, 25, 40, 80, 200])
@pytest.mark.parametrize("height", [0, 1, 4, 5, 6, 7, 20])
def test_a_plot_fits_any_size(width: int, height: int, unicode: bool):
    lines = plot(
        {"a long name of a run: loss": FALLING, "other: eval_loss": [(3.0, 9.0)]},
        width,
        height,
        unicode,
    ).splitlines()
    assert len(lines) <= max(height, 1)
    assert all(columns_of(line) <= width for line in lines)


def test_without_unicode_everything_is_ascii():
    series = {f"run {at}: loss": FALLING for at in range(10)}
    assert plot(series, 80, 20, False).isascii()


def test_numbers_that_are_none_are_left_out():
    holes = [(1.0, math.nan), (2.0, 3.0), (3.0, math.inf), (4.0, 1.0)]
    assert plot({"loss": holes}, 60, 12, True) == plot({"loss": holes[1::2]}, 60, 12, True)
    assert plot({"loss": holes[:1], "other": []}, 60, 12, True) == "nothing to plot yet"
    assert plot({}, 60, 12, True) == "nothing to plot yet"


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 2.0)],
        [(1.0, 2.0), (2.0, 2.0)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(1.0, 1e300), (2.0, -1e300)],
        [(1.0, 1e308), (2.0, -1e308), (3.0, 1.0)],
        [(1.0, 1e-300), (2.0, 2e-300)],
        [(1.0, 1e16), (2.0, 1e16 + 2)],
        [(5.0, 1.0), (5.0, 2.0), (4.0, 3.0)],
        [(-1e9, 1.0), (1e9, 2.0)],
    ],
)
@pytest.mark.parametrize("unicode", [True, False])
def test_any_finite_values_can_be_plotted(points: list[tuple[float, float]], unicode: bool):
    lines = plot({"loss": points}, 80, 16, unicode).splitlines()
    assert len(lines) == 16
    assert max(map(columns_of, lines)) <= 80
    assert re.search("[⠁-⣿*]", "".join(lines[1:]))


def test_there_is_colour_only_when_asked_for_and_it_changes_no_character():
    series = {"a: loss": FALLING, "a: eval_loss": [(50.0, 3.5)]}
    painted = plot(series, 80, 20, True, colour=True)
    assert "\033[36m" in painted
    assert re.sub("\033\\[[0-9]*m", "", painted).replace(" ", "") == plot(
        series, 80, 20, True
    ).replace(" ", "")
    assert "\033" not in plot(series, 80, 20, True)


def test_several_runs_can_be_told_apart_without_colour():
    higher = [(x, y + 2) for x, y in FALLING]
    drawn = plot({"a: loss": FALLING, "b: loss": higher}, 80, 20, True)
    assert "⣀⣀ a: loss   ◆ b: loss" in drawn
    assert len(re.findall("◆", drawn)) > 40
