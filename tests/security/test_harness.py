"""The harness itself: it sees a healthy server, and one that is stopped."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tests.security.world import MOST_BYTES

if TYPE_CHECKING:
    from tests.security.world import World


def test_the_tenants_are_two_and_the_server_is_well(world: World) -> None:
    session = world.attacker.session()
    world.neighbour.session()
    assert world.neighbour.get(f"sessions/{session}").status == 404
    assert world.attacker.get(f"sessions/{session}").status == 200
    world.assert_well()
    assert world.metric("tinkex_requests_total", route="create_session", status="200") >= 2


def test_watching_measures_a_stop_and_the_memory(world: World) -> None:
    with world.watching() as seen:
        os.kill(world.server.pid, signal.SIGSTOP)
        time.sleep(3.0)  # a busy machine lets the probe wait, too
        os.kill(world.server.pid, signal.SIGCONT)
    assert max(seen.health_s) > 0.5
    assert seen.sample_s
    assert 50 << 20 < seen.peak_bytes < MOST_BYTES
