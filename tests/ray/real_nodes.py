"""Real nodes on a real Ray: started and stopped by the command, found in the database.

The test process itself is no program of Ray's: those may end with Ray's head.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.cluster.nodes import Cluster
from tests.e2e.serving import MODEL, ROOT, children, environment, wait_gone
from tests.patience import PATIENCE_S, until
from tests.ray.raylets import add_machine, kill, raylet_of, raylets

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ray.cluster_utils import Cluster as RayCluster

NAME = "lab"
NODES, LEASE_S = 2, 5.0
# Every machine has room for all nodes, so that one that is lost is not missed for long.
CPUS = NODES + 1
MACHINES = 2
# Raylets whose head is lost wait for it no longer than this, and nor does the test.
SYSTEM = {"gcs_rpc_server_reconnect_timeout_s": 5}


@dataclass
class RayNodes(Cluster):
    """A cluster on Ray: two nodes with a model, and one without, which clients talk to."""

    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    # Mutable state: the Ray that there is now.
    ray: RayCluster | None = None

    def start_ray(self) -> None:
        """Start Ray; a head without CPUs, and machines for nodes."""
        ray = raylets(0, *([CPUS] * MACHINES), system_config=dict(SYSTEM))
        self.ray = self.stack.enter_context(ray)

    def command(self, *words: str) -> Any:
        """What `tinkex cluster` prints as JSON."""
        return json.loads(self.tinkex("--format", "json", "cluster", *words))

    def tinkex(self, *words: str) -> str:
        """Run a command of the operator with the settings of the nodes."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.cluster_command", *words],
            env=environment(self.folder, **self.settings),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> list[Any]:
        """Start the nodes, or those that are missing; returns all of them."""
        found = self.command(
            *("up", "--name", NAME, "--address", self.address, "--host", "127.0.0.1"),
            *("--cpu-nodes", f"{MODEL}={NODES}", "--api-nodes", "1"),
            *("--start-timeout", str(PATIENCE_S), "--placement-timeout", str(PATIENCE_S)),
        )
        return found["nodes"]

    def down(self) -> int:
        """Drain and stop the nodes; returns how many."""
        return self.command("down", "--name", NAME, "--address", self.address)["stopped"]

    @property
    def address(self) -> str:
        assert self.ray is not None
        return str(self.ray.address)

    @property
    def port(self) -> int:
        """Where the node without a model listens now; raises when there is none."""
        # One that was lost is alive until its lease has run out.
        rows = self.query(
            "SELECT url FROM nodes WHERE role = 'api' AND state = 'alive' ORDER BY number"
        )
        if not rows:
            raise ConnectionRefusedError
        return urlsplit(rows[-1][0]).port or 0

    def alive(self) -> dict[str, str]:
        """The ids of the nodes that serve, by name."""
        ready = (
            "SELECT name, node_id FROM nodes WHERE state = 'alive' "
            "AND (role = 'api' OR base_models::text LIKE '%tiny%') ORDER BY number"
        )
        return dict(self.query(ready))

    def wait_for_others_than(self, ids: set[str]) -> None:
        """Wait until all nodes serve, none of them under one of these ids."""

        def all_serve() -> bool:
            found = self.alive()
            return len(found) == NODES + 1 and not ids & set(found.values())

        until(all_serve, f"nodes {ids} did not come back")

    def pid(self, name: str) -> int | None:
        """The process of a node, if it runs."""
        return next(iter(self._pids(name)), None)

    def _pids(self, name: str | None = None) -> list[int]:
        words = [
            b"--join",
            NAME.encode(),
            b"--node-name",
            *([] if name is None else [name.encode()]),
        ]
        wanted = b"\0".join(words) + (b"\0" if name is not None else b"")
        return [pid for pid in self._processes() if wanted in command_line(pid)]

    def _processes(self) -> list[int]:
        """Everything that runs on the machines of Ray."""
        return [pid for machine in self.machines for pid in children(raylet_of(machine))]

    @property
    def machines(self) -> list[Any]:
        """The machines of Ray but its head."""
        assert self.ray is not None
        return list(self.ray.worker_nodes)

    def machine_of(self, name: str) -> Any:
        """The machine that a node runs on."""
        pid = self.pid(name)
        return next((m for m in self.machines if pid in children(raylet_of(m))), None)

    def lose(self, machine: Any, *, raylet_only: bool = False) -> None:
        """A machine of Ray is lost with everything that runs there; another one joins."""
        below = children(raylet_of(machine))
        kill(machine, "raylet")
        for pid in below if not raylet_only else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            wait_gone(pid, PATIENCE_S)
        assert self.ray is not None
        self.ray.remove_node(machine, allow_graceful=False)
        add_machine(self.ray, CPUS)

    def lose_head(self) -> None:
        """Ray's head is lost: its machines give up, and no node is left behind."""
        assert self.ray is not None
        pids = self._processes()
        kill(self.ray.head_node, "gcs_server")
        for machine in (self.ray.head_node, *self.machines):
            # Raylets are children of this process. What runs on one looks for its raylet by the
            # number of its process, which stays until the exit status is collected.
            [raylet] = machine.all_processes["raylet"]
            raylet.process.wait(PATIENCE_S)
        for pid in pids:
            wait_gone(pid, PATIENCE_S)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def ray_nodes(folder: Path, database: str, artifacts: str, **more: str) -> Generator[RayNodes]:
    """A cluster whose nodes serve; `more` are settings."""
    settings = {
        "TINKEX_DATABASE": database,
        "TINKEX_ARTIFACTS": artifacts,
        "TINKEX_LEASE_S": str(LEASE_S),
        "TINKEX_THREADS": "1",
        **more,
    }
    found = RayNodes(folder, database, settings=settings)
    with found.stack:
        found.start_ray()
        yield found
