"""A disk that is full for a while: said as such, nothing corrupt, and training goes on after it.

A limit on the size of files stands in for the full disk: every write of the process fails.
"""

from __future__ import annotations

import json
import resource
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import tinkex
from tests.e2e.serving import KEY, MODEL, children, served
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

TEXT = list(b"the quick brown fox jumps over the lazy dog")


@contextmanager
def full_disk(*pids: int) -> Generator[None]:
    """None of these processes can write a byte to a file."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def trainer(url: str) -> Any:
    service = tinkex.ServiceClient(base_url=url, api_key=KEY)
    return service, service.create_lora_training_client(base_model=MODEL, rank=4, seed=7)


def step(training: Any, number: int) -> list[Any]:
    """Everything a step says; submitted, and asked for by the caller."""
    tokens = TEXT[number : number + 12]
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 11},
    )
    passed = training.forward_backward([datum], "cross_entropy")
    return [passed, training.optim_step(tinkex.AdamParams(learning_rate=1e-3))]


def told(futures: list[Any]) -> list[dict[str, float]]:
    return [future.result(timeout=PATIENCE_S).metrics for future in futures]


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{url}/api/v1/{path}", json.dumps(body).encode(), {"x-api-key": KEY}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_full_disk_is_said_as_such_and_training_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    with served(tmp_path / "calm") as server:
        service, training = trainer(server.url)
        calm = [told(step(training, number)) for number in range(4)]
        service.close("success").result(timeout=PATIENCE_S)
    with served(tmp_path / "data") as server:
        (engine,) = children(server.pid)
        service, training = trainer(server.url)
        troubled = [told(step(training, 0))]
        with full_disk(engine):
            with pytest.raises(tinkex.RequestFailedError, match="could not be stored") as failed:
                training.save_state("first").result(timeout=PATIENCE_S)
            assert "File too large" in str(failed.value)
            assert str(tmp_path) not in str(failed.value)  # where the server's files are
            troubled.append(told(step(training, 1)))
        with full_disk(server.pid):
            body = {"model_id": training.model_id, "seq_id": 999, "adam_params": {}}
            status, text = post(server.url, "optim_step", body)
            assert status in (503, 507)
            assert "storage" in text or "space" in text or "full" in text
            futures = step(training, 2)
        troubled.append(told(futures))
        assert training.save_state("second").result(timeout=PATIENCE_S).path.endswith("/second")
        service.close("success").result(timeout=PATIENCE_S)
    with served(tmp_path / "data") as server:
        service, _ = trainer(server.url)
        path = f"tinker://{training.model_id}/weights/second"
        again = service.create_training_client_from_state_with_optimizer(path)
        troubled.append(told(step(again, 3)))
        service.close("success").result(timeout=PATIENCE_S)
    assert troubled == calm
