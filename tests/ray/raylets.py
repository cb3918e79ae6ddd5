"""A real Ray cluster of several raylets on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests.patience import PATIENCE_S
from tinkex.ray_cluster.cluster import Cluster, Limits
from tinkex.ray_cluster.nodes import NodeGroup, NodeSpec, node_specs
from tinkex.ray_cluster.restarts import RestartPolicy
from tinkex.ray_cluster.secrets import NodeSecrets

if TYPE_CHECKING:
    from collections.abc import Generator

    from ray.cluster_utils import Cluster as RayCluster

    from tinkex.ray_cluster.connection import RayConnection
    from tinkex.ray_cluster.nodes import NodeKind

FAKE_NODE = (sys.executable, str(Path(__file__).with_name("fake_node.py")))
NAMED_NODE = (sys.executable, str(Path(__file__).with_name("named_node.py")))
# Of this process: lists of processes also show the commands of other tests.
PASSWORD = f"m4rk3r-of-a-secret-{uuid4().hex}"
_SMALL = {"object_store_memory": 80 << 20}
POLICY = RestartPolicy(first_delay_s=0.05, longest_delay_s=0.2, quick_s=0.0, most_failures=3)


@contextmanager
def raylets(
    first: int, *cpus: int, gpus: int = 0, system_config: dict[str, Any] | None = None
) -> Generator[RayCluster]:
    """A head and other raylets, with these numbers of CPUs; the head says it has some GPUs."""
    from ray.cluster_utils import Cluster as RayCluster

    head: dict[str, Any] = {"num_cpus": first, "include_dashboard": False, **_SMALL}
    head["num_gpus"] = gpus
    if system_config:
        head["_system_config"] = system_config
    cluster = RayCluster(initialize_head=True, head_node_args=head)
    try:
        for count in cpus:
            add_machine(cluster, count)
        yield cluster
    finally:
        cluster.shutdown()


def add_machine(cluster: RayCluster, cpus: int) -> None:
    """One more raylet."""
    cluster.add_node(num_cpus=cpus, **_SMALL)


def raylet_of(machine: Any) -> int:
    """The process of a machine's raylet; everything that runs on the machine is below it."""
    [process] = machine.all_processes["raylet"]
    return process.process.pid


def kill(machine: Any, kind: str) -> None:
    """End one of the processes of Ray on a machine without a word: `raylet`, `gcs_server`."""
    [process] = machine.all_processes[kind]
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()


class Driver:
    """`up` and `down` of one cluster with fake nodes, and what is seen of them."""

    def __init__(self, connection: RayConnection, name: str, folder: Path, **limits: float) -> None:
        self.name = name
        self.connection = connection
        self.events = folder / f"{name}.events"
        self.said: list[str] = []
        self.secrets = NodeSecrets(
            {
                "TINKEX_DATABASE": f"postgresql://user:{PASSWORD}@127.0.0.1/db",
                "AWS_SECRET_ACCESS_KEY": f"aws-{PASSWORD}",
                "TINKEX_FAKE_EVENTS": str(self.events),
            }
        )
        patient = {"placement_s": PATIENCE_S, "start_s": PATIENCE_S, "drain_s": PATIENCE_S}
        self.cluster = Cluster(
            connection,
            name,
            self.said.append,
            limits=Limits(**{**patient, **limits}),
            policy=POLICY,
        )

    def specs(
        self,
        model: str = "fake/model",
        count: int = 1,
        cpus: float = 1.0,
        kind: NodeKind = "cpu",
    ) -> list[NodeSpec]:
        group = NodeGroup(kind=kind, count=count, base_model=model)
        return node_specs(self.name, [group], cpus=cpus, host="127.0.0.1", program=FAKE_NODE)

    def seen(self, event: str) -> list[str]:
        """The events of this kind, as lines."""
        if not self.events.exists():
            return []
        return [line for line in self.events.read_text().splitlines() if line.startswith(event)]

    def alive(self) -> list[int]:
        """The processes of nodes that were started and still run."""
        pids = [int(line.split()[-1]) for line in self.seen("started")]
        return [pid for pid in pids if is_running(pid)]


def ask(url: str, path: str = "/") -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}{path}", timeout=PATIENCE_S) as reply:
        return json.loads(reply.read())


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    """The process that has started this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def mentions(text: str) -> list[str]:
    """Command lines of this machine's processes that contain `text`."""
    lines: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                lines.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return [line for line in lines if text in line]
