"""The commands of the section "On Ray" of the how-to page about clusters, on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tinkex
from tests.cluster.loopback import Machine, stand_ins
from tests.contracts.conftest import postgres
from tests.docs.blocks import DOCS, ROOT, blocks_of
from tests.e2e.serving import MODEL, children, reserved_port, wait_gone
from tests.e2e.workers import datum
from tests.patience import PATIENCE_S
from tests.s3 import bucket, s3_environment, s3_url
from tinkex.ray_cluster.local_ray import processes

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.contracts.postgres import PostgresServer

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(3 * PATIENCE_S),
]
__all__ = ["bucket", "postgres", "s3_environment", "s3_url"]

PAGE = DOCS / "how-to" / "cluster.md"
HERE = f"{Path(__file__).relative_to(ROOT)} runs it"
DATABASE = "postgresql://tinkex:change-me@10.0.0.10/tinkex"
# `ray` as it is, but small, and with its files in a folder of the test.
RAY = """
case " $* " in *" --head "*) more="--include-dashboard=false --temp-dir={folder}/r";; esac
exec {python} -m ray.scripts.scripts "$@" --num-cpus=3 --object-store-memory=83886080 \\
    --disable-usage-stats $more
"""


@pytest.fixture
def short() -> Generator[Path]:
    """A folder with a short path: Ray's sockets are in it. What runs there ends with the test."""
    folder = Path(tempfile.mkdtemp(prefix="tx", dir="/tmp"))
    yield folder
    # Not `ray stop`, which ends every Ray of this machine.
    left = [pid for each in processes(folder) for pid in (each, *children(each))]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in left:
        wait_gone(pid, PATIENCE_S)
    shutil.rmtree(folder)


@pytest.fixture
def port() -> Generator[int]:
    with reserved_port("127.0.0.11") as port:
        yield port


@pytest.fixture
def machines(
    tmp_path: Path,
    short: Path,
    postgres: PostgresServer,
    bucket: str,
    s3_url: str,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Machine]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = {
        DATABASE: f"'{postgres.new_place()}'",
        "http://10.0.0.10:9000": s3_url,
        "s3://tinkex-weights": f"s3://{bucket}",
        "--nodes 'Qwen/Qwen3-8B=2xGPU'": f"--cpu-nodes {MODEL}=2",
        "--nodes 'Qwen/Qwen3-8B=1xGPU'": f"--cpu-nodes {MODEL}=1",
        "10.0.0.": "127.0.0.",
        ":6379": f":{port}",
        "--port=6379": f"--port={port}",
        "--port-base 9000": "",  # these ports may be taken
        "tinkex cluster up": "tinkex -f json cluster up",
    }
    path = stand_ins(tmp_path / "bin", "false")
    ray = tmp_path / "bin" / "ray"
    ray.write_text("#!/bin/sh" + RAY.format(folder=short, python=sys.executable))
    ray.chmod(0o755)
    found = {
        name: Machine(name, tmp_path / name, words, path) for name in ("10.0.0.11", "10.0.0.12")
    }
    (shared,) = [block for block in blocks_of(PAGE) if "cluster.env on every" in block.text]
    more = f"\nTINKEX_LEASE_S=5\nTINKEX_THREADS=1\nTMPDIR={short}"
    for machine in found.values():
        machine.root.mkdir()
        machine.write("/etc/tinkex/cluster.env", shared.text + more)
    return found


def test_the_sections_commands_run(machines: dict[str, Machine]) -> None:
    key = ""
    sizes: list[int] = []
    for block in blocks_of(PAGE):
        if block.not_run != HERE:
            continue
        head, _, rest = block.text.partition("\n")
        for line in rest.splitlines():
            printed = machines[head.removeprefix("# on ")].run(line)
            if line.startswith("tinkex key create"):
                key = printed.strip()
            elif line.startswith("tinkex cluster up"):
                nodes = json.loads(printed)["nodes"]
                assert {node["state"] for node in nodes} == {"ready"}
                sizes.append(len(nodes))
                if key:
                    (front,) = [node["url"] for node in nodes if node["name"] == "api-0"]
                    _train(front, key)
            elif line.startswith("tinkex cluster down"):
                assert printed == f"Stopped {sizes[-1]} nodes of lab.\n"
    assert sizes == [3, 3, 2]


def _train(url: str, key: str) -> None:
    """Clients use the key on the node without a model."""
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        training = service.create_lora_training_client(MODEL, rank=4)
        done = training.forward_backward([datum()], "cross_entropy").result(PATIENCE_S)
        assert done.metrics["loss:sum"] > 0
