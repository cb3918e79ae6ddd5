"""`tinkex serve` whose database and artifacts are elsewhere: PostgreSQL and an S3 bucket.

Nothing that counts is in the data folder then: a server on another machine goes on with it.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.contracts.conftest import postgres
from tests.e2e.serving import KEY, reserved_port, served
from tests.e2e.workers import losses, sample
from tests.patience import PATIENCE_S
from tests.s3 import bucket, s3_environment, s3_url
from tinkex import ServiceClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

__all__ = ["bucket", "postgres", "s3_environment", "s3_url"]


@pytest.fixture
def port() -> Iterator[str]:
    with reserved_port() as port:
        yield str(port)


def test_a_server_on_another_machine_goes_on_with_database_and_bucket(
    tmp_path: Path, postgres: PostgresServer, bucket: str, port: str
) -> None:
    place = ("--database", postgres.new_place(), "--artifacts", f"s3://{bucket}/adapters")
    flags = (*place, "--port", port)
    with served(tmp_path / "first", *flags) as server:
        client = ServiceClient(base_url=server.url, api_key=KEY)
        training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=1)
        before = losses(training, 3)
        path = training.save_state("half").result(PATIENCE_S).path
        sampler = training.save_weights_and_get_sampling_client()
        tokens = sample(sampler)
        server.end(signal.SIGKILL)
    with served(tmp_path / "second", *flags):
        again = client.create_training_client_from_state_with_optimizer(path)
        assert losses(again, 2) == losses(training, 2)
        assert sample(sampler) == tokens
        assert before[0] > before[-1]
        client.close().result(PATIENCE_S)
