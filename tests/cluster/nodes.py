"""Nodes of a cluster as real processes: one PostgreSQL schema, one folder for weights."""

from __future__ import annotations

import os
import signal
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psycopg

from tests.e2e.serving import MODEL, Served, children, started
from tests.patience import PATIENCE_S, until
from tinkex import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path
    from typing import Any

    from tinkex import SamplingClient, TrainingClient

# Long enough for a machine that is busy with other tests: a node that stalls for so long is dead.
LEASE_S = 8.0


@dataclass
class Cluster:
    """Running nodes by name; a node that is started again gets the same name."""

    folder: Path
    database: str
    flags: tuple[str, ...] = ()
    artifacts: str | None = None
    auth: bool = False
    model: str = MODEL
    nodes: dict[str, Served] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, name: str, *flags: str, wait: bool = True, model: str = "") -> Served:
        """Start a node, and return when it is ready."""
        served = self.stack.enter_context(
            started(
                self.folder / name,
                *("--join", "test", "--node-name", name),
                *("--database", f"{self.database}&application_name=node-{name}"),
                *("--artifacts", self.artifacts or f"file://{self.folder / 'weights'}"),
                *("--base-model", model or self.model, "--threads", "1", "--port", "0"),
                *(() if self.auth else ("--no-auth",)),
                # Keys move when a test says so.
                *("--set", f"lease_s={LEASE_S}", "--set", "rebalance_s=0", *self.flags, *flags),
            )
        )
        self.nodes[name] = served
        if wait:
            served.wait_ready()
        return served

    def kill(self, name: str) -> None:
        """End a node and its engine without a word, as the loss of its machine does."""
        served = self.nodes.pop(name)
        for pid in (*children(served.pid), served.pid):
            with suppress(ProcessLookupError):  # it has ended with the one before it
                os.kill(pid, signal.SIGKILL)
        served.popen.wait(PATIENCE_S)

    def freeze(self, name: str) -> None:
        served = self.nodes[name]
        os.kill(served.pid, signal.SIGSTOP)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """What the database has."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            return connection.execute(statement.encode()).fetchall()

    def metric(self, name: str, metric: str) -> float:
        """The value of a node's metric."""
        with urllib.request.urlopen(f"{self.nodes[name].url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == metric
        )

    def owner_of(self, key: str) -> str:
        """The name of the node that owns a key."""
        ((name,),) = self.query(
            "SELECT n.name FROM claims c JOIN nodes n ON n.node_id = c.node_id "
            f"WHERE c.key = '{key}'"
        )
        return name


def owned_by(name: str, nodes: Cluster, make: Callable[[], TrainingClient]) -> TrainingClient:
    """A new model of a node; others are made on the way, also before all nodes know of it."""
    made: list[TrainingClient] = []

    def has_one() -> bool:
        made.append(make())
        return nodes.owner_of(made[-1].model_id) == name

    until(has_one, f"no new model goes to {name}")
    return made[-1]


def sample_many(sampler: SamplingClient, count: int, max_tokens: int = 16) -> list[list[int]]:
    """The tokens of many samples that are asked for at once, each with a seed of its own."""
    futures = [
        sampler.sample(
            ModelInput.from_ints([1 + number % 7, 2, 3]),
            1,
            SamplingParams(max_tokens=max_tokens, seed=number),
        )
        for number in range(count)
    ]
    return [list(future.result(PATIENCE_S).sequences[0].tokens) for future in futures]


@contextmanager
def cluster(
    folder: Path,
    database: str,
    *names: str,
    gateway: str | None = None,
    flags: tuple[str, ...] = (),
    artifacts: str | None = None,
    model: str = MODEL,
) -> Generator[Cluster]:
    """A cluster with these nodes, and one without an engine; all of them end with the block."""
    (folder / "weights").mkdir(parents=True)
    found = Cluster(folder, database, flags, artifacts, model=model)
    with found.stack:
        for name in names:
            found.start(name, wait=False)
        if gateway is not None:
            found.start(gateway, "--role", "api", wait=False)
        for served in found.nodes.values():
            served.wait_ready()
        yield found
