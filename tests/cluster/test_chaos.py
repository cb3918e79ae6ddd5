"""Nodes are lost, frozen, cut off, stopped and relieved of models while clients work.

In the end every loop was told the same, and has saved the same bytes, as on a server of its own.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from tests.cluster.disturbances import KINDS, check_records, disturbed, planned
from tests.cluster.nodes import cluster
from tests.contracts.conftest import postgres
from tests.e2e.serving import served
from tests.e2e.test_durability import run
from tests.patience import until
from tests.s3 import bucket, s3_environment, s3_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.disturbances import Disturbance
    from tests.cluster.nodes import Cluster
    from tests.contracts.postgres import PostgresServer

    Saved = dict[str, set[str]]

__all__ = ["bucket", "postgres", "s3_environment", "s3_url"]
SDKS = ("tinkex", "tinker")
GATE = "gate"
# Many: nothing new happens while a node that was lost is still starting.
MOST_ROUNDS = 50
# With the first one, fifty-four disturbances.
FIRST_SEED, MORE_SEEDS = 1, range(2, 10)
# A client that does not end its session is given up after a while, and its models are closed.
FLAGS = ("--set", "session_timeout_s=20", "--set", "upkeep_interval_s=2", "--set", "rebalance_s=5")

pytestmark = pytest.mark.timeout(600)


def saved(files: dict[str, bytes]) -> Saved:
    """The bytes of everything that was saved under a name; by name, of all models."""
    found: Saved = {}
    for file, content in files.items():
        name = file.rpartition("%2F")[2]
        if "-step-" in name:
            found.setdefault(name, set()).add(hashlib.sha256(content).hexdigest())
    return found


def in_folder(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in folder.rglob("*.safetensors"):
        with suppress(FileNotFoundError):  # of a session that has just ended
            found[path.name] = path.read_bytes()
    return found


def in_bucket(place: str) -> dict[str, bytes]:
    files: Any = fsspec.filesystem("s3", skip_instance_cache=True)
    found: dict[str, bytes] = {}
    for path in files.find(place):
        with suppress(FileNotFoundError):  # as above
            found[path.rpartition("/")[2]] = files.cat_file(path)
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Saved]:
    """What one loop is told by an undisturbed server, and what it has saved there."""
    folder = tmp_path_factory.mktemp("calm")
    with served(folder / "data") as server:
        told = run("tinkex", server.url, folder)
        files = saved(in_folder(folder / "data"))
    assert len(files) == 10
    return told, files


def disturb(
    nodes: Cluster,
    calm: tuple[Any, Saved],
    read: Callable[[], dict[str, bytes]],
    moments: list[Disturbance],
) -> None:
    """Loops of both clients, again and again until everything has happened that was planned."""
    with disturbed(nodes, GATE, moments) as (disturber, url), ThreadPoolExecutor() as pool:
        rounds = 0
        while disturber.moments and rounds < MOST_ROUNDS:
            rounds += 1
            loops = [pool.submit(run, sdk, url, nodes.folder) for sdk in SDKS]
            for sdk, loop in zip(SDKS, loops, strict=True):
                assert (sdk, loop.result()) == (sdk, calm[0])
        disturber.settle()
        assert disturber.done == moments
    assert saved(read()) == calm[1]
    check_records(nodes)
    count = "SELECT count(*) FROM checkpoints WHERE name LIKE 'm%-step-%'"
    assert nodes.query(count) == [(10 * rounds * len(SDKS),)]
    nothing_is_left(nodes)
    assert [name for name in read() if not is_kept(name)] == []


def nothing_is_left(nodes: Cluster) -> None:
    """Sessions that are over hold nothing on any node."""
    for left in (
        "SELECT session_id FROM sessions WHERE active",
        "SELECT key FROM claims",
        "SELECT model_id FROM models WHERE snapshot_seq < 0 OR snapshot_location IS NOT NULL",
        "SELECT sampler_id FROM samplers WHERE dropped IS NULL",
        "SELECT sampler_id FROM samplers WHERE location IS NOT NULL",
    ):
        until(lambda: not nodes.query(left), left)  # noqa: B023 - called at once


def is_kept(name: str) -> bool:
    """Whether a file stays when sessions are over: a checkpoint, or the mark of a node."""
    return "-step-" in name or name.startswith("cluster%2F")


@pytest.mark.parametrize(
    "seed",
    [FIRST_SEED, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in MORE_SEEDS)],
)
def test_disturbed_in_every_way_clients_are_told_the_same(
    tmp_path: Path, postgres: PostgresServer, calm: tuple[Any, Saved], seed: int
) -> None:
    with cluster(tmp_path, postgres.new_place(), "a", "b", gateway=GATE, flags=FLAGS) as nodes:
        disturb(nodes, calm, lambda: in_folder(tmp_path / "weights"), planned(seed, *KINDS))


@pytest.mark.exhaustive
def test_the_same_holds_with_weights_in_an_object_store(
    tmp_path: Path, postgres: PostgresServer, calm: tuple[Any, Saved], bucket: str
) -> None:
    place = f"{bucket}/weights"
    with cluster(
        tmp_path,
        postgres.new_place(),
        *("a", "b"),
        gateway=GATE,
        flags=FLAGS,
        artifacts=f"s3://{place}",
    ) as nodes:
        moments = planned(21, "node", "freeze", "move", "terminate")
        disturb(nodes, calm, lambda: in_bucket(place), moments)
