"""`python -m benchmarks.cluster`: the same clients on 1, 2 and 4 nodes, and the loss of a node.

Nodes are real processes on one real PostgreSQL, with a simulated device (`node.py`). Throughput is
given as a share of nodes times the throughput of one node. Transactions are those of the whole
database while many runs train, per operation; heartbeats and renewals are among them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.cluster.crowd import KEY, MODEL, sampling_rate, step, training_rate
from tests.contracts.postgres import postgres_server
from tests.e2e.serving import children, environment
from tinkex import ServiceClient

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.contracts.postgres import PostgresServer

START_S = 60.0
LEASE_S = 6.0
SHARE = 0.9
PASSED_ON = 0.95
RECOVERY_S = LEASE_S + 3.0


@dataclass(frozen=True)
class Sizes:
    """What is done; part of the JSON line."""

    runs: int = 24
    callers: int = 128
    seconds: float = 15.0


@dataclass(frozen=True)
class Row:
    """One number of nodes."""

    nodes: int
    steps_per_s: float
    samples_per_s: float
    transactions_per_operation: float


class Nodes:
    """Node processes on one schema; all end with the stack."""

    def __init__(self, stack: ExitStack, folder: Path, database: str) -> None:
        self._stack = stack
        self._folder = folder
        self._database = database
        self.running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(self, *roles: str) -> list[str]:
        """The addresses of nodes with these roles."""
        begun = [self._begin(f"n{number}", role) for number, role in enumerate(roles)]
        for name, popen in begun:
            self.running[name] = popen, _url(popen)
        return [url for _, url in self.running.values()]

    def _begin(self, name: str, role: str) -> tuple[str, subprocess.Popen[str]]:
        weights = self._folder / "weights"
        weights.mkdir(exist_ok=True)
        popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.cluster.node", "--format", "json"),
                *("--join", "benchmark", "--node-name", name, "--database", self._database),
                *("--artifacts", f"file://{weights}", "--data-dir", str(self._folder / name)),
                *("--base-model", MODEL, "--port", "0", "--no-auth", "--log-level", "error"),
                *("--role", role, "--set", f"lease_s={LEASE_S}"),
            ],
            env=environment(self._folder),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(popen.wait)
        self._stack.callback(popen.kill)
        return name, popen

    def owner(self, key: str) -> str:
        """The node that owns a model."""
        query = "SELECT n.name FROM claims c JOIN nodes n USING (node_id) WHERE c.key = %s"
        with psycopg.connect(self._database) as connection:
            row = connection.execute(query, (key,)).fetchone()
        assert row is not None
        return row[0]

    def transactions(self) -> int:
        """How many transactions the database has seen."""
        query = (
            "SELECT xact_commit + xact_rollback FROM pg_stat_database "
            "WHERE datname = current_database()"
        )
        with psycopg.connect(self._database) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]

    def kill(self, name: str) -> None:
        """End a node as the loss of its machine does."""
        popen, _ = self.running.pop(name)
        for pid in (*children(popen.pid), popen.pid):
            os.kill(pid, signal.SIGKILL)


def _url(popen: subprocess.Popen[str]) -> str:
    assert popen.stdout is not None
    ready, _, _ = select.select([popen.stdout], [], [], START_S)
    line = popen.stdout.readline() if ready else ""
    if not line:
        raise SystemExit(f"a node did not start within {START_S:g} s")
    return json.loads(line)["url"]


@contextmanager
def nodes_on(postgres: PostgresServer, *roles: str) -> Generator[tuple[Nodes, list[str]]]:
    """A new cluster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = Nodes(stack, folder, postgres.new_place())
        urls = nodes.start(*roles)
        # Nodes see each other's base models with the next reading of the list.
        time.sleep(LEASE_S / 2)
        yield nodes, urls


def measured(postgres: PostgresServer, count: int, sizes: Sizes) -> Row:
    """Throughput of a cluster with so many nodes."""
    with nodes_on(postgres, *["full"] * count) as (nodes, urls):
        before, began = nodes.transactions(), time.monotonic()
        steps = training_rate(urls, sizes.runs, sizes.seconds)
        lasted = time.monotonic() - began
        transactions = nodes.transactions() - before
        samples = sampling_rate(urls, sizes.callers, sizes.seconds)
    # Two operations a step, also while it warmed up.
    return Row(count, steps, samples, transactions / (2 * steps * lasted))


def passed_on_share(postgres: PostgresServer, sizes: Sizes) -> float:
    """What is left of a node's samples per second when another node passes all of them on."""
    rates: dict[str, float] = {}
    with nodes_on(postgres, "full", "api") as (_, urls):
        owner, front = urls
        for url in (owner, front, front, owner):
            more = sampling_rate([url], sizes.callers, sizes.seconds)
            rates[url] = rates.get(url, 0.0) + more
    return rates[front] / rates[owner]


def recovery_s(postgres: PostgresServer) -> float:
    """How long a model does not train after its node is gone."""
    with nodes_on(postgres, "full", "full", "full") as (nodes, urls):
        names = list(nodes.running)
        with ExitStack() as stack:
            clients = [
                stack.enter_context(ServiceClient(base_url=url, api_key=KEY)) for url in urls
            ]
            for client in clients:
                training = client.create_lora_training_client(MODEL, rank=4, seed=1)
                owner = nodes.owner(training.model_id)
                if owner != names[urls.index(_address(client))]:
                    break
            step(training)
            nodes.kill(owner)
            began = time.monotonic()
            step(training)
            return time.monotonic() - began


def _address(client: ServiceClient) -> str:
    return str(client.holder.config.base_url) if hasattr(client, "holder") else ""


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=Sizes.seconds)
    options = parser.parse_args()
    sizes = Sizes(seconds=options.seconds)
    with postgres_server() as postgres:
        rows = [measured(postgres, count, sizes) for count in options.nodes]
        passed_on = passed_on_share(postgres, sizes)
        recovery = recovery_s(postgres)
    first = rows[0]
    print("nodes  steps/s  share  samples/s  share  transactions/operation")
    met = recovery <= RECOVERY_S and passed_on >= PASSED_ON
    for row in rows:
        scale = row.nodes / first.nodes
        shares = (
            row.steps_per_s / first.steps_per_s / scale,
            (row.samples_per_s / first.samples_per_s / scale),
        )
        met = met and min(shares) >= SHARE
        print(
            f"{row.nodes:5} {row.steps_per_s:8.1f} {shares[0]:6.2f} {row.samples_per_s:10.1f} "
            f"{shares[1]:6.2f} {row.transactions_per_operation:23.2f}"
        )
    print(f"samples through a node without an engine: {passed_on:.2f} of those sent directly")
    print(f"a model trains again {recovery:.1f} s after its node is gone (lease {LEASE_S:g} s)")
    bars = f"share {SHARE}, passed on {PASSED_ON}, {RECOVERY_S:g} s"
    print(f"bars: {bars}: {'met' if met else 'MISSED'}")
    print(f"measured on {machine()}")
    about = {"benchmark": "cluster", "commit": commit(), "hardware": hardware()}
    result = {
        "rows": [asdict(row) for row in rows],
        "passed_on_share": passed_on,
        "recovery_s": recovery,
        "lease_s": LEASE_S,
    }
    print(json.dumps({**about, **asdict(sizes), **result, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
