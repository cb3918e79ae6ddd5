"""`tinkex serve --join` itself on Ray, with PostgreSQL: nodes serve, are taken over, and leave."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import tinkex
from tests.contracts.conftest import postgres
from tests.e2e.killing import Relay
from tests.e2e.serving import MODEL, served
from tests.e2e.workers import losses, sample
from tests.patience import PATIENCE_S
from tests.ray.real_nodes import NODES, ray_nodes

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer
    from tests.ray.real_nodes import RayNodes

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(3 * PATIENCE_S),
]
__all__ = ["postgres"]


class _Address:
    """What clients are connected to: the node without a model, wherever Ray has started it."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes

    @property
    def port(self) -> int:
        return self._nodes.port

    def count(self) -> None:
        """Nothing happens with a request."""

    def kill(self, moment: object) -> None:
        """Nothing is planned."""


@contextmanager
def address(nodes: RayNodes) -> Generator[str]:
    relay = Relay(_Address(nodes))
    relay.start()
    try:
        yield f"http://127.0.0.1:{relay.port}"
    finally:
        relay.stop()


def test_a_model_outlives_the_machine_of_its_owner_and_ray_brings_the_node_back(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    database = postgres.new_place()
    with ray_nodes(tmp_path, database, f"file://{tmp_path / 'weights'}") as nodes:
        key = nodes.tinkex("key", "create", "--owner", "alice").strip()
        started = nodes.up()
        assert [node["state"] for node in started] == ["ready"] * (NODES + 1)
        before = nodes.alive()
        with address(nodes) as url, tinkex.ServiceClient(base_url=url, api_key=key) as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=1)
            told = losses(training, 5)
            owner = nodes.owner_of(training.model_id)
            assert owner in before
            nodes.lose(nodes.machine_of(owner))
            told += losses(training, 5)
            ((now, epoch),) = nodes.query("SELECT node_id, epoch FROM claims")
            assert now != before[owner]
            assert epoch > 1
            tokens = sample(training.save_weights_and_get_sampling_client())
        nodes.wait_for_others_than({before[owner]})
        shown = nodes.command("status", "--database", database)["nodes"]
        assert sorted(node["name"] for node in shown) == sorted(before)
        # Nothing has changed for `up`.
        assert {node["name"] for node in nodes.up()} == set(before)
        assert nodes.down() == NODES + 1
        assert nodes.query("SELECT name FROM nodes WHERE state IN ('alive', 'draining')") == []
    with (
        served(tmp_path / "alone") as server,
        tinkex.ServiceClient(base_url=server.url, api_key="tml-alone") as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        assert losses(training, 10) == told
        assert sample(training.save_weights_and_get_sampling_client()) == tokens
