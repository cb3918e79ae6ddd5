"""The soak judges lines by their growth, and lets a killed process start a new line."""

from __future__ import annotations

import pytest

from benchmarks.soak.readings import Process, Reading
from benchmarks.soak.report import Flatness, judge, resources

TABLES = ("operations", "usage")
LINES = {resource.name: resource for resource in resources(TABLES)}


def readings(memory: list[float], *, killed_every: int = 0, rows: int = 100) -> list[Reading]:
    """One reading each ten seconds; with kills, memory starts again at its first value."""
    found: list[Reading] = []
    for number in range(len(memory)):
        life = number // killed_every if killed_every else 0
        value = memory[number - life * killed_every]
        server = Process(life, value, 7, 20)
        found.append(Reading(10.0 * number, server, None, {"operations": rows, "usage": 9}))
    return found


def growth(found: list[Reading], name: str = "server: memory_mib") -> Flatness:
    judged = judge(LINES[name], found, warm_up_s=20.0)
    assert judged is not None
    return judged


def test_a_line_that_rises_only_in_the_first_third_is_flat():
    judged = growth(readings([50.0, 60.0, 70.0, 80.0, *[90.0] * 8]))
    assert judged.growth == pytest.approx(0.0)
    assert judged.flat


def test_a_leak_is_seen():
    judged = growth(readings([100.0 + 5.0 * n for n in range(13)]))
    assert judged.growth == pytest.approx(40.0)
    assert not judged.flat


def test_a_leak_is_seen_across_the_lives_of_a_killed_process():
    steady = [60.0, 80.0, 100.0, 100.0, 100.0, 100.0] * 4
    assert growth(readings(steady, killed_every=6)).flat
    leaking = [60.0, 80.0, 100.0, 110.0, 120.0, 130.0] * 4
    assert not growth(readings(leaking, killed_every=6)).flat


def test_connections_of_clients_are_no_leak_of_descriptors():
    def reading(number: int, descriptors: int, clients: float) -> Reading:
        server = Process(1, 100.0, 7, descriptors)
        return Reading(10.0 * number, server, None, metrics={"tinkex_connections_open": clients})

    busier = [reading(n, 20 + 2 * n, 2.0 * n) for n in range(12)]
    assert growth(busier, "server: descriptors").flat
    leaking = [reading(n, 20 + 2 * n, 3.0) for n in range(12)]
    assert not growth(leaking, "server: descriptors").flat


def test_what_is_kept_by_contract_is_not_judged():
    assert "operations: rows" in LINES
    assert "usage: rows" not in LINES


def test_a_process_that_was_never_seen_is_not_judged():
    assert judge(LINES["engine: memory_mib"], readings([1.0] * 9), warm_up_s=0.0) is None
