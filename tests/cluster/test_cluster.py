"""A cluster of real nodes: any node answers, ownership follows the nodes, no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.nodes import Cluster, cluster, until
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
    with cluster(tmp_path, postgres.new_place(), "a", "b", "c") as nodes:
        owner, other = _trained_elsewhere(nodes, alone)
        assert owner != other


def _trained_elsewhere(nodes: Cluster, alone: tuple[list[float], list[int]]) -> tuple[str, str]:
    # The client talks to a node that is not killed.
    client = ServiceClient(base_url=nodes.nodes["c"].url, api_key=KEY)
    told: list[float] = []
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)
    owner = nodes.owner_of(training.model_id)
    if owner == "c":
        nodes.query("SELECT 1")
    told += losses(training, 5)
    if owner != "c":
        nodes.kill(owner)
    told += losses(training, 5)
    now = nodes.owner_of(training.model_id)
    tokens = sample(training.save_weights_and_get_sampling_client())
    client.close()
    assert (told, tokens) == alone
    return owner, now if owner != "c" else "none"


def test_until_is_used() -> None:
    until(lambda: True, "never")
