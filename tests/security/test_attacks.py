"""Every attack: refused in few words, within memory, and the neighbour does not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.security.attacks import ATTACKS
from tests.security.world import MOST_BYTES, MOST_CPU_S

if TYPE_CHECKING:
    from tests.security.attacks import Attack
    from tests.security.world import World


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=f"{kind.partition(' ')[0]}-{attack.__name__}")
        for kind, attacks in ATTACKS.items()
        for attack in attacks
    ],
)
def test_an_attack_is_refused_and_nobody_else_notices(world: World, attack: Attack) -> None:
    failures = world.metric("tinkex_requests_total", status="500")
    with world.watching() as seen:
        attack(world)
    world.assert_well()
    assert seen.peak_bytes < MOST_BYTES
    steps = _longest_steps(world)
    assert max(steps.values()) < MOST_CPU_S, steps
    assert world.metric("tinkex_requests_total", status="500") == failures


def _longest_steps(world: World) -> dict[str, float]:
    """The CPU time of the longest step on the event loop, by route; a busy machine adds none."""
    name = "tinkex_loop_longest_cpu_seconds{"
    lines = world.neighbour.get("/metrics").body.decode().splitlines()
    steps = [line.removeprefix(name).split() for line in lines if line.startswith(name)]
    return {route: float(value) for route, value in steps}
