"""The load balancers of the page about clusters: a run notices nothing of the loss of nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.balancers import ADDRESSES, balanced, behind_each
from tests.cluster.disturbances import run
from tests.cluster.nodes import cluster
from tests.contracts.conftest import postgres
from tests.e2e.serving import MODEL, environment, read_line
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.cluster.balancers import Balanced, Balancer
    from tests.cluster.nodes import Cluster
    from tests.contracts.postgres import PostgresServer

__all__ = ["postgres"]

STEPS = 10
DRAINED_AFTER = 1
REPLACED_AFTER = 4
KILLED_AFTER = 7
PROGRAM = f"""
import sys, tinkex
from tests.e2e.workers import datum
with tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x") as service:
    training = service.create_lora_training_client({MODEL!r}, rank=4, seed=1)
    print(training.model_id, flush=True)
    for _ in range({STEPS}):
        future = training.forward_backward([datum()], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result({PATIENCE_S})
        print(future.result({PATIENCE_S}).metrics["loss:sum"], flush=True)
        if sys.argv[2] == "wait":
            sys.stdin.readline()
"""


@contextmanager
def program(front: Balanced, home: Path, how: str) -> Generator[subprocess.Popen[str]]:
    env = environment(home, SSL_CERT_FILE=str(front.authority.certificate))
    command = [sys.executable, "-c", PROGRAM, front.url, how]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        try:
            yield popen
        finally:
            popen.kill()


@behind_each
def test_a_run_outlives_the_nodes_that_owned_it(
    balancer: Balancer, tmp_path: Path, postgres: PostgresServer
) -> None:
    with cluster(tmp_path / "nodes", postgres.new_place(), "a", "b", gateway="front") as nodes:
        ports = {name: int(nodes.nodes[name].port) for name in ADDRESSES}
        with balanced(balancer, tmp_path, ports) as front:
            with program(front, tmp_path, "go on") as undisturbed:
                expected = undisturbed.communicate(timeout=PATIENCE_S)[0].splitlines()[1:]
            assert len(expected) == STEPS
            assert _streamed(front).endswith("data: [DONE]\n\n")
            assert front.status("GET", "/metrics") == 404
            with program(front, tmp_path, "wait") as disturbed:
                assert _losses(disturbed, nodes) == expected


def _streamed(front: Balanced) -> str:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer tml-x"}
    with front.asked("POST", "/v1/completions", body, headers) as reply:
        assert reply.status == 200
        return reply.read().decode()


def _losses(disturbed: subprocess.Popen[str], nodes: Cluster) -> list[str]:
    """What a run prints while its owner is drained and stopped, and its next owner is killed.

    The load balancer does not know the third owner: the node without an engine passes requests on.
    """
    assert disturbed.stdin is not None
    model_id = read_line(disturbed, PATIENCE_S).strip()
    drained = nodes.owner_of(model_id)
    told: list[str] = []
    for number in range(STEPS):
        told.append(read_line(disturbed, PATIENCE_S).strip())
        if number == DRAINED_AFTER:
            run(nodes, "cluster", "drain", drained)
            nodes.nodes[drained].popen.terminate()
        if number == REPLACED_AFTER:
            assert nodes.nodes[drained].popen.wait(PATIENCE_S) == 0
            nodes.start("c")
        if number == KILLED_AFTER:
            nodes.kill(nodes.owner_of(model_id))
        disturbed.stdin.write("\n")
        disturbed.stdin.flush()
    return told
