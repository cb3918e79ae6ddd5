"""Benchmarks judge by ratios of what one run measured, never by figures from elsewhere."""

from __future__ import annotations

import pytest

from benchmarks.client_cost.__main__ import MEASUREMENTS
from benchmarks.forwarding import report as forwarding
from benchmarks.public_api.__main__ import measure
from benchmarks.public_api.report import Row, rows, table
from benchmarks.server_overhead import report as overhead
from benchmarks.side_by_side import Costs
from benchmarks.side_by_side import table as two_checkouts


class Side:
    """A server that gives one figure for everything, and writes down when it was asked."""

    def __init__(self, name: str, value: float, asked: list[str]) -> None:
        self._name, self._value, self._asked = name, value, asked

    def run(self, figure: str, seconds: float) -> float:
        self._asked.append(self._name)
        return self._value


def test_without_a_peer_there_is_no_ratio_and_no_bar():
    found = rows()
    measure(found, {"server": Side("server", 2.0, [])}, rounds=2, seconds=0.0)
    shown = table(found)
    assert all(row.ratio is None for row in found)
    for word in ("peer", "ratio", "pass", "MISS"):
        assert word not in shown


def test_a_peer_is_measured_in_turn_and_both_stand_in_the_table():
    asked: list[str] = []
    found = [Row("step_latency_s", "step latency, s"), Row("sample_1", "sample 1, tok/s")]
    sides = {"server": Side("server", 2.0, asked), "peer": Side("peer", 6.0, asked)}
    measure(found, sides, rounds=2, seconds=0.0)
    assert asked == ["server", "peer", "peer", "server"] * 2
    # Three times as quick, and a third of the tokens.
    assert [row.ratio for row in found] == [3.0, pytest.approx(1 / 3)]
    assert [line[-4:] for line in table(found, 1.0).splitlines()[1:]] == ["pass", "MISS"]
    assert max(map(len, table(found, 1.0).splitlines())) <= 80


def test_a_ratio_is_the_median_of_rounds_that_had_the_same_load():
    row = Row("sample_1", "", {"server": [10.0, 1.0, 12.0], "peer": [5.0, 0.5, 6.0]})
    assert row.ratio == 2.0
    assert row.quartiles == (2.0, 2.0)


def overhead_figures(slowness: float) -> overhead.Figures:
    """What a machine measures that is so many times slower than another."""
    found = overhead.Figures()
    for _ in range(2):
        found.add(
            {
                "step_s": {
                    "engine": [0.030 * slowness],
                    "served": [0.040 * slowness],
                    "bare": [0.0004 * slowness],
                },
                "step_cpu_ms": {
                    "engine": [1.0 * slowness],
                    "served": [12.0 * slowness],
                    "bare": [0.46 * slowness],
                },
                "cpu_ms": {
                    "engine": [0.1 * slowness],
                    "server": [0.8 * slowness],
                    "client": [0.3 * slowness],
                    "bare": [0.5 * slowness],
                },
                "wave_s": {"engine": [0.1 * slowness], "served": [0.2 * slowness]},
            }
        )
    found.resident_mib = {"served": 115.0, "bare": 51.0}
    return found


@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_what_the_server_adds_is_judged_alike_on_slow_machines(slowness: float):
    judged = overhead.rows(overhead_figures(slowness))
    assert [round(row.ratio, 1) for row in judged] == [25.0, 23.9, 2.0, 2.3]
    assert all(row.passed for row in judged)
    assert max(map(len, overhead.table(overhead_figures(slowness)).splitlines())) <= 80


def test_a_server_that_adds_more_than_the_bar_misses_it():
    found = overhead_figures(1.0)
    found.step_cpu_ms["served"] = [50.0, 50.0]
    assert [row.passed for row in overhead.rows(found)] == [True, False, True, True]


def test_every_bar_of_the_client_is_a_ratio_to_the_official_one():
    bars = [row.bar for _, found in MEASUREMENTS.values() for row in found if row.bar]
    assert bars
    assert all(bar.met(None, 0.0) is None for bar in bars)


def test_two_checkouts_are_compared_by_all_of_their_rounds():
    costs = Costs()
    for mine, other in ((1.0, 1.0), (1.2, 1.0), (1.3, 1.5), (1.5, 1.5)):
        costs.add("sample", "this", mine)
        costs.add("sample", "other", other)
    costs.add("GET", "this", 2.08)
    costs.add("GET", "other", 2.0)
    costs.add("GET", "this", 2.08)
    costs.add("GET", "other", 2.0)
    assert costs.ratio("sample") == pytest.approx(1.0)
    low, high = costs.quartiles("sample")
    assert low < 1.0 < high
    shown = two_checkouts(costs, 1.03).splitlines()
    assert [line[-4:] for line in shown[1:]] == ["pass", "MISS"]
    assert max(map(len, shown)) <= 80


def test_what_passing_on_adds_is_the_median_of_rounds_that_had_the_same_load():
    rows = [
        forwarding.Row("small", True, [1.0, 5.0, 1.0], [1.4, 5.4, 9.0]),
        forwarding.Row("slow", True, [1.0], [2.5]),
        forwarding.Row("large", False, [1.0], [20.0]),
    ]
    assert [round(row.added, 3) for row in rows] == [0.4, 1.5, 19.0]
    assert [row.passed for row in rows] == [True, False, True]
    lines = forwarding.table(rows).splitlines()
    assert [line[-4:] for line in lines[1:3]] == ["pass", "MISS"]
    assert max(map(len, lines)) <= 80
