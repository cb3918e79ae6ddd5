"""A cluster of real nodes: any node answers, ownership follows the nodes, no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.nodes import Cluster, cluster
from tests.contracts.conftest import postgres
from tests.e2e.serving import KEY, served
from tests.e2e.workers import datum, sample
from tests.patience import PATIENCE_S
from tinkex import AdamParams, ServiceClient

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer
    from tinkex import TrainingClient

__all__ = ["postgres"]


def losses(training: TrainingClient, count: int) -> list[float]:
    futures = []
    for _ in range(count):
        futures.append(training.forward_backward([datum()], "cross_entropy"))
        training.optim_step(AdamParams(learning_rate=0.01))
    return [future.result(PATIENCE_S).metrics["loss:sum"] for future in futures]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int]]:
    """The losses of ten steps and a sample of an undisturbed server."""
    with served(tmp_path_factory.mktemp("alone") / "data") as server:
        client = ServiceClient(base_url=server.url, api_key=KEY)
        training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)
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
        training = _owned_elsewhere(nodes, client)
        owner = nodes.owner_of(training.model_id)
        told = losses(training, 5)
        nodes.kill(owner)
        told += losses(training, 5)
        assert nodes.owner_of(training.model_id) != owner
        tokens = sample(training.save_weights_and_get_sampling_client())
        assert (told, tokens) == alone


def _owned_elsewhere(nodes: Cluster, client: ServiceClient) -> TrainingClient:
    """A model that the client's own node does not own."""
    for _ in range(20):
        training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)
        if nodes.owner_of(training.model_id) != "c":
            return training
    raise AssertionError("every model is on the client's own node")
