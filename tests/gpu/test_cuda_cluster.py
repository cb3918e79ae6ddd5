"""Nodes of a cluster that compute on a GPU: the loss of one changes no bit of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.cluster.nodes import cluster, owned_by, sample_many
from tests.contracts.postgres import postgres_server
from tests.e2e.serving import KEY, started
from tests.patience import PATIENCE_S
from tests.unit.engine.models.reference import random_model
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.engine.models.tokenizer import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.cluster.nodes import Cluster
    from tinkex import TrainingClient

NAME = "test/gpu"
STEPS = 12
SAMPLES = 96
GPU = ("--device", "cuda", "--set", f"cache_bytes={2**30}", "--set", f"adapter_bytes={2**30}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model of several layers in bf16."""
    folder = tmp_path_factory.mktemp("model")
    made = random_model(
        "Qwen3",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" not in name:
                weight.mul_(0.2)  # so that its logits differ from token to token
    made.bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer().json)
    return f"{NAME}={folder}"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, model: str) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with (
        postgres_server() as server,
        cluster(
            folder, server.new_place(), "a", "b", gateway="gate", flags=GPU, model=model
        ) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, model: str
) -> tuple[list[float], list[list[int]]]:
    """The losses of a run, and samples, of one undisturbed server."""
    flags = (*GPU, "--base-model", model, "--port", "0", "--no-auth")
    with started(tmp_path_factory.mktemp("alone") / "data", *flags) as server:
        server.wait_ready()
        with ServiceClient(base_url=server.url, api_key=KEY) as client:
            training = new_model(client)
            told = losses(training, range(STEPS))
            return told, sample_many(training.save_weights_and_get_sampling_client(), SAMPLES, 24)


def new_model(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client(NAME, rank=16, seed=1)


def batch(step: int) -> list[Datum]:
    generator = torch.Generator().manual_seed(step)
    data: list[Datum] = []
    for length in (40, 200, 17, 333):
        tokens = torch.randint(4096, (length,), generator=generator).tolist()
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return data


def losses(training: TrainingClient, steps: range) -> list[float]:
    futures: list[Any] = []
    for step in steps:
        futures.append(training.forward_backward(batch(step), "cross_entropy"))
        training.optim_step(AdamParams(learning_rate=1e-3))
    return [future.result(PATIENCE_S).metrics["loss:sum"] for future in futures]


@pytest.mark.parametrize("owner", ["a", "b"])
def test_the_loss_of_the_owner_changes_no_loss_and_no_sample(
    nodes: Cluster, alone: tuple[list[float], list[list[int]]], owner: str
) -> None:
    assert len(set(alone[0])) == STEPS
    half = STEPS // 2
    with ServiceClient(base_url=nodes.nodes["gate"].url, api_key=KEY) as client:
        training = owned_by(owner, nodes, lambda: new_model(client))
        told = losses(training, range(half))
        nodes.kill(owner)
        told += losses(training, range(half, STEPS))
        assert told == alone[0]
        assert nodes.owner_of(training.model_id) != owner
        nodes.start(owner)
        # Computed by both nodes as soon as the new one has the weights.
        sampler = training.save_weights_and_get_sampling_client()
        assert [sample_many(sampler, SAMPLES, 24) for _ in range(3)] == [alone[1]] * 3
