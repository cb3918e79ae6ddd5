"""Samples of one sampler that several nodes compute: same tokens, and a fallback to the owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.nodes import Cluster, cluster, owned_by, sample_many
from tests.contracts.conftest import postgres
from tests.e2e.serving import KEY
from tests.e2e.workers import datum
from tests.patience import PATIENCE_S, until
from tinkex import AdamParams, ServiceClient

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.contracts.postgres import PostgresServer
    from tinkex import TrainingClient

__all__ = ["postgres"]

MANY = 96


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Generator[Cluster]:
    with cluster(tmp_path_factory.mktemp("nodes"), postgres.new_place(), "a", "b") as found:
        yield found


def trained(client: ServiceClient) -> TrainingClient:
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.1)).result(PATIENCE_S)
    return training


def computed_elsewhere(nodes: Cluster) -> float:
    return sum(nodes.metric(name, "tinkex_samples_elsewhere_total") for name in nodes.nodes)


def test_many_samples_of_one_sampler_are_computed_by_both_nodes(nodes: Cluster) -> None:
    with ServiceClient(base_url=nodes.nodes["a"].url, api_key=KEY) as client:
        sampler = trained(client).save_weights_and_get_sampling_client()
        # One by one: all at the owner, which has the weights and nothing else to do.
        before = computed_elsewhere(nodes)
        alone = [sample_many(sampler, 1)[0]]
        location = "SELECT count(*) FROM samplers WHERE location IS NOT NULL"
        until(lambda: nodes.query(location) == [(1,)], "the weights are not in a file")
        first = sample_many(sampler, MANY)
        assert first[0] == alone[0]

        def both_compute() -> bool:
            assert sample_many(sampler, MANY) == first
            return computed_elsewhere(nodes) > before

        # Not before the owner knows that the other one serves, and has many to compute at once.
        until(both_compute, "all samples are computed by the owner")


def test_a_node_that_is_gone_costs_no_sample(nodes: Cluster) -> None:
    with ServiceClient(base_url=nodes.nodes["a"].url, api_key=KEY) as client:
        training = owned_by("a", nodes, lambda: trained(client))
        sampler = training.save_weights_and_get_sampling_client()
        expected = sample_many(sampler, MANY)
        nodes.kill("b")
        assert sample_many(sampler, MANY) == expected
