"""What is left of nodes when Ray loses a machine, or its head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.patience import until
from tests.ray.raylets import Driver, add_machine, ask, is_running, kill, raylets
from tinkex.ray_cluster.connection import RayConnection

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.exhaustive]


def test_a_node_whose_machine_is_lost_starts_on_another_one(tmp_path: Path):
    with raylets(0, 1) as cluster, RayConnection(cluster.address) as connection:
        some = Driver(connection, "lost", tmp_path)
        [before] = some.cluster.up(some.specs(), some.secrets)
        [machine] = cluster.worker_nodes
        add_machine(cluster, 1)
        kill(machine, "raylet")
        until(lambda: not is_running(before.pid or 0))
        [after] = until(lambda: [r for r in some.cluster.reports() if r.state == "ready"])
        assert ask(after.url or "")["pid"] == after.pid != before.pid
        # Nothing has changed for `up`.
        [same] = some.cluster.up(some.specs(), some.secrets)
        assert same.pid == after.pid
        some.cluster.down()


def test_nodes_serve_without_the_head_and_up_starts_them_on_a_new_one(tmp_path: Path):
    # Long enough to ask the node before its raylet gives up, on a machine that stalls, too.
    patience = {"gcs_rpc_server_reconnect_timeout_s": 30}
    with raylets(0, 1, system_config=patience) as cluster:
        with RayConnection(cluster.address) as connection:
            some = Driver(connection, "headless", tmp_path)
            [before] = some.cluster.up(some.specs(), some.secrets)
        kill(cluster.head_node, "gcs_server")
        assert ask(before.url or "")["pid"] == before.pid
        # Its raylet gives up, and no orphan keeps the lease.
        until(lambda: not is_running(before.pid or 0))
    with raylets(1) as cluster, RayConnection(cluster.address) as connection:
        some = Driver(connection, "headless", tmp_path)
        [after] = some.cluster.up(some.specs(), some.secrets)
        assert ask(after.url or "")["pid"] == after.pid
        some.cluster.down()
