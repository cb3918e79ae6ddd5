"""Nodes on a real Ray cluster of two raylets: started, changed, revived, given up, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.blocks import ROOT
from tests.patience import PATIENCE_S, until
from tests.ray.raylets import PASSWORD, Driver, ask, is_running, mentions, parent, raylets
from tinkex.ray_cluster.connection import ClusterError, RayConnection

pytest.importorskip("ray")

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tinkex.ray_cluster.supervisor import NodeReport

    MakeDriver = Callable[..., Driver]

_NUMBERS = count()
# Ray's own modules, in this process.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]


@pytest.fixture(scope="module")
def connection() -> Generator[RayConnection]:
    with raylets(2, 2, gpus=2) as cluster, RayConnection(cluster.address) as connection:
        yield connection


@pytest.fixture
def driver(connection: RayConnection, tmp_path: Path) -> Generator[MakeDriver]:
    made: list[Driver] = []

    def make(**limits: float) -> Driver:
        made.append(Driver(connection, f"test{next(_NUMBERS)}", tmp_path, **limits))
        return made[-1]

    yield make
    for each in made:
        each.cluster.down(force=True)
        until(lambda: not each.alive())  # noqa: B023 - called at once


def _ready(driver: Driver, starts: int = 1) -> list[NodeReport]:
    """The nodes that are ready and were started so often."""
    reports = driver.cluster.reports()
    return [each for each in reports if (each.state, each.starts) == ("ready", starts)]


def _exit(url: str | None, status: int) -> None:
    with suppress(OSError):
        ask(url or "", f"/exit/{status}")


def test_nodes_start_and_get_their_secrets_and_down_drains_them(driver: MakeDriver):
    some = driver()
    reports = some.cluster.up(some.specs(count=2), some.secrets)
    assert [report.state for report in reports] == ["ready", "ready"]
    assert {ask(report.url or "")["database"] for report in reports} == {
        f"postgresql://user:{PASSWORD}@127.0.0.1/db"
    }
    assert len([line for line in some.said if "http://127.0.0.1" in line]) == 2
    assert some.cluster.down() == 2
    assert len(some.seen("drained")) == 2
    assert not some.cluster.reports()


def test_up_again_adds_and_removes_and_leaves_the_others_alone(driver: MakeDriver):
    some = driver()
    [first] = some.cluster.up(some.specs(count=1), some.secrets)
    more = some.cluster.up(some.specs(count=2), some.secrets)
    assert more[0].pid == first.pid
    assert [report.state for report in more] == ["ready", "ready"]
    fewer = some.cluster.up(some.specs(count=1), some.secrets)
    assert [report.pid for report in fewer] == [first.pid]
    assert [line.split()[-1] for line in some.seen("drained")] == [str(more[1].pid)]
    assert len(some.cluster.reports()) == 1


@pytest.mark.exhaustive
def test_up_with_another_setting_replaces_a_node(driver: MakeDriver):
    some = driver()
    [first] = some.cluster.up(some.specs(), some.secrets)
    [second] = some.cluster.up(some.specs(cpus=0.5), some.secrets)
    assert second.pid != first.pid
    assert len(some.seen("drained")) == 1


def test_a_node_that_exits_is_started_again(driver: MakeDriver):
    some = driver()
    [node] = some.cluster.up(some.specs(), some.secrets)
    for starts, status in enumerate((1, 75), 2):
        _exit(node.url, status)
        [node] = until(lambda: _ready(some, starts))  # noqa: B023 - called at once


def test_a_node_that_cannot_start_is_given_up_with_its_last_lines(driver: MakeDriver):
    some = driver()
    with pytest.raises(ClusterError, match="failed 3 times in a row") as caught:
        some.cluster.up(some.specs("fake/fails"), some.secrets)
    assert "the model is damaged" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert len(some.seen("started")) == 3
    assert not some.connection.actors(some.name), "half a cluster is left"


def test_a_node_that_fails_takes_those_started_with_it_along(driver: MakeDriver):
    some = driver()
    some.cluster.up(some.specs("fake/old"), some.secrets)
    wanted = some.specs("fake/old") + some.specs("fake/new") + some.specs("fake/fails")
    with pytest.raises(ClusterError, match="failed 3 times in a row"):
        some.cluster.up(wanted, some.secrets)
    assert [report.name[:7] for report in some.cluster.reports()] == ["cpu-old"]


def test_what_cannot_be_placed_is_said_and_nothing_is_left(
    driver: MakeDriver, connection: RayConnection, tmp_path: Path
):
    some = driver()
    small = some.specs("fake/small", count=4)
    some.cluster.up(small, some.secrets)
    hasty = Driver(connection, some.name, tmp_path, placement_s=1.0)
    large = some.specs("fake/large", count=2)
    with pytest.raises(ClusterError, match="cannot place 2 of 2 new nodes") as caught:
        hasty.cluster.up(small + large, some.secrets)
    assert "demanded: 2 x (1 CPU), for cpu-large" in str(caught.value)
    assert str(caught.value).count("0 of 2 CPU") == 2
    assert "--placement-timeout" in caught.value.hint
    assert [report.name[:9] for report in some.cluster.reports()] == ["cpu-small"] * 4
    with pytest.raises(ClusterError, match="cannot place"):
        hasty.cluster.up(small + large, some.secrets, keep_partial=True)
    assert len(connection.actors(some.name)) == 6
    # Those that wait are removed as easily as those that run.
    assert len(some.cluster.up(small[:1], some.secrets)) == 1
    assert len(connection.actors(some.name)) == 1


def test_a_node_dies_with_its_actor_and_ray_starts_both_again(driver: MakeDriver):
    some = driver()
    [before] = some.cluster.up(some.specs(), some.secrets)
    assert before.pid is not None
    os.kill(parent(before.pid), signal.SIGKILL)
    until(lambda: not is_running(before.pid or 0))
    [after] = until(lambda: _ready(some))
    assert ask(after.url or "")["pid"] == after.pid != before.pid


@pytest.mark.exhaustive
def test_a_node_that_ignores_sigterm_is_killed(driver: MakeDriver):
    some = driver(drain_s=0.5)
    [node] = some.cluster.up(some.specs("fake/stubborn"), some.secrets)
    some.cluster.down()
    assert not is_running(node.pid or 0)


def test_secrets_are_in_no_process_list_no_log_and_no_table_of_ray(driver: MakeDriver):
    some = driver()
    some.cluster.up(some.specs(count=2), some.secrets)
    assert mentions("fake_node.py"), "the process list was not read"
    assert not mentions(PASSWORD)
    logs = Path(_session_folder()) / "logs"

    def read() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}

    # Both nodes log it; an actor may write it down after its node has become ready.
    until(lambda: sum(text.count(b"postgresql://user:***@") for text in read().values()) >= 2)
    texts = read()
    assert not [path for path, text in texts.items() if PASSWORD.encode() in text]
    tables = _tables()
    assert some.name.encode() in b"".join(tables), "no table was read"
    assert not [table for table in tables if PASSWORD.encode() in table]
    assert PASSWORD not in repr(some.secrets)


def test_the_command_takes_its_secrets_off_its_command_line(driver: MakeDriver):
    """Ray lists the command line of every program that has connected."""
    some = driver()
    database = f"postgresql://user:{PASSWORD}@127.0.0.1/db"
    where = ("--address", some.connection.address, "--host", "127.0.0.1", "-f", "json")
    words = ("up", "--name", some.name, "--database", database, "--cpu-nodes", "fake/model=1")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.ray.cluster_command",
            "-f",
            "json",
            "cluster",
            *words,
            *where,
        ],
        env={**os.environ, "TINKEX_FAKE_EVENTS": str(some.events)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    [node] = json.loads(done.stdout)["nodes"]
    assert ask(node["url"])["database"] == database
    assert any(b"tests.ray.cluster_command" in table for table in _tables())
    assert not [table for table in _tables() if PASSWORD.encode() in table]


def _session_folder() -> str:
    import ray

    node: Any = ray._private.worker._global_node  # type: ignore[attr-defined]
    return node.get_session_dir_path()


def _tables() -> list[bytes]:
    """What Ray's dashboard and state API are made from: actors, jobs, workers, tasks."""
    from ray._private import state

    accessor: Any = state.state._connect_and_get_accessor()
    return [
        *accessor.get_actor_table(None, None),
        *accessor.get_job_table(),
        *accessor.get_worker_table(),
        *accessor.get_task_events(),
    ]


def test_nodes_with_gpus_get_one_each(
    driver: MakeDriver, connection: RayConnection, tmp_path: Path
):
    some = driver()
    reports = some.cluster.up(some.specs(count=2, cpus=0.5, kind="gpu"), some.secrets)
    told = [ask(report.url or "") for report in reports]
    assert sorted(each["devices"] for each in told) == ["0", "1"]
    assert all(each["arguments"][-2:] == ["--device", "cuda"] for each in told)
    more = some.specs(count=3, cpus=0.5, kind="gpu")
    hasty = Driver(connection, some.name, tmp_path, placement_s=3.0)
    with pytest.raises(ClusterError) as caught:
        hasty.cluster.up(more, some.secrets)
    text = str(caught.value)
    assert "demanded: 1 x (1 GPU, 0.5 CPU)" in text
    assert "0 of 2 GPU" in text
    assert [report.state for report in some.cluster.reports()] == ["ready", "ready"]
