"""`tinkex serve --join` itself on Ray, with PostgreSQL: nodes serve, are revived, and leave."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tinkex
from tests.contracts.postgres import postgres_server
from tests.patience import PATIENCE_S
from tests.ray.raylets import is_running, raylets, until
from tinkex import AdamParams, Datum, ModelInput
from tinkex.cli.main import main
from tinkex.ray_cluster.cluster import Cluster, Limits
from tinkex.ray_cluster.connection import Connection
from tinkex.ray_cluster.nodes import NodeGroup, node_specs
from tinkex.ray_cluster.secrets import NodeSecrets

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.exhaustive]

TOKENS = list(b"nodes on Ray")
DATA = [Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})]
LIMITS = Limits(placement_s=PATIENCE_S, start_s=PATIENCE_S, drain_s=PATIENCE_S)


def test_a_run_survives_the_loss_of_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with (
        postgres_server() as server,
        raylets(1, 1) as ray_cluster,
        Connection(ray_cluster.address) as connection,
    ):
        database = server.new_place()
        assert main(["key", "create", "--database", database]) == 0
        key = capsys.readouterr().out.strip()
        settings = {"TINKEX_DATABASE": database, "TINKEX_ARTIFACTS": f"file://{tmp_path}"}
        secrets = NodeSecrets({**settings, "TINKEX_LEASE_S": "5", "TINKEX_THREADS": "1"})
        group = NodeGroup(kind="cpu", count=2, base_model="tinkex/tiny")
        specs = node_specs("lab", [group], host="127.0.0.1")
        said: list[str] = []
        cluster = Cluster(connection, "lab", said.append, limits=LIMITS)
        nodes = cluster.up(specs, secrets)
        assert [node.state for node in nodes] == ["ready", "ready"], said
        with tinkex.ServiceClient(base_url=nodes[0].url, api_key=key) as service:
            training = service.create_lora_training_client("tinkex/tiny", rank=4)
            before = _step(training)
            other = nodes[1].pid or 0
            os.kill(other, signal.SIGKILL)
            until(lambda: not is_running(other))
            until(lambda: all(node.state == "ready" for node in cluster.reports()))
            after = _step(training)
        assert after < before
        cluster.down()
        assert _states(database) <= {"left", "dead"}


def _step(training: Any) -> float:
    done = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.01)).result(timeout=PATIENCE_S)
    return done.result(timeout=PATIENCE_S).metrics["loss:sum"]


def _states(database: str) -> set[str]:
    with psycopg.connect(database) as connection:
        return {row[0] for row in connection.execute("SELECT state FROM nodes").fetchall()}
