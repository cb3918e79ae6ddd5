"""A cluster of real nodes: any node answers, ownership follows the nodes, no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.nodes import cluster, owned_by
from tests.contracts.conftest import postgres
from tests.e2e.serving import KEY, served
from tests.e2e.workers import losses, sample
from tests.patience import PATIENCE_S
from tinkex import ServiceClient

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer
    from tinkex import TrainingClient

__all__ = ["postgres"]


def new_model(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int]]:
    """The losses of ten steps and a sample of an undisturbed server."""
    with served(tmp_path_factory.mktemp("alone") / "data") as server:
        client = ServiceClient(base_url=server.url, api_key=KEY)
        training = new_model(client)
        told = losses(training, 10)
        tokens = sample(training.save_weights_and_get_sampling_client())
        client.close()
    return told, tokens


def test_a_model_outlives_the_node_that_owned_it(
    tmp_path: Path, postgres: PostgresServer, alone: tuple[list[float], list[int]]
) -> None:
    with (
        cluster(tmp_path, postgres.new_place(), "a", "b", "c") as nodes,
        # The client talks to a node that is not killed.
        ServiceClient(base_url=nodes.nodes["c"].url, api_key=KEY) as client,
    ):
        owner = "a"
        training = owned_by(owner, nodes, lambda: new_model(client))
        told = losses(training, 5)
        nodes.kill(owner)
        told += losses(training, 5)
        assert nodes.owner_of(training.model_id) != owner
        tokens = sample(training.save_weights_and_get_sampling_client())
        assert (told, tokens) == alone


def test_nodes_share_the_quota_of_a_tenant(tmp_path: Path, postgres: PostgresServer) -> None:
    most = 5
    flags = ("--set", f"max_checkpoints={most}")
    with (
        cluster(tmp_path, postgres.new_place(), "a", "b", flags=flags) as nodes,
        ServiceClient(base_url=nodes.nodes["a"].url, api_key=KEY) as client,
    ):
        models = [owned_by(name, nodes, lambda: new_model(client)) for name in "abab"]
        saves = [model.save_state(f"s{n}") for n in range(4) for model in models]
        refused = [str(error) for save in saves if (error := save.exception(PATIENCE_S))]
        assert all("max_checkpoints" in text for text in refused)
        kept = 16 - len(refused)
        # A node that looks while another one has just stored something counts it twice.
        assert 1 <= kept <= most
        for n in range(kept, most):
            models[n % 4].save_state(f"t{n}").result(PATIENCE_S)
        for model in models:
            assert "max_checkpoints" in str(model.save_state("u").exception(PATIENCE_S))
        assert nodes.query("SELECT count(*) FROM checkpoints") == [(most,)]
        assert nodes.query("SELECT count(*) FROM reservations") == [(0,)]
