"""`python -m benchmarks.cluster.database`: what the nodes of a cluster ask of their database.

Two parts, both on a real PostgreSQL and without a device:

1. Counts, which are the same on every machine: statements and transactions for each thing that a
   node does, through the API of one node with the fake engine of the test kit.
2. Load: many nodes' stores in this process, which send what nodes with so many sessions send, at
   rates that double until the database or this process cannot keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Engine

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.cluster.in_process import MODEL, InProcessNode, node, node_id, store_of_node
from tests.contracts.postgres import postgres_server
from tests.contracts.store_suite import DONE, model, session, step, used
from tests.e2e.serving import children
from tinkex.server.store.ownership import NodeLoad

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from tests.contracts.postgres import PostgresServer
    from tinkex.server.store.sql import SqlStore

# Long, so that renewals are not counted among other things.
QUIET_LEASE_S = 600.0
LEASE_S = 15.0
HEARTBEAT_S = 10.0
REPEATS = 50
AT_ONCE = 32
BODY = b"x" * 4096
KEPT_UP = 0.95
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Sent:
    """What was sent to the database."""

    statements: int = 0
    transactions: int = 0


@dataclass(frozen=True)
class Cost:
    """What one thing costs the database."""

    what: str
    statements: float
    transactions: float


@dataclass(frozen=True)
class Load:
    """One rate of training operations; CPU in cores."""

    offered_per_s: float
    done_per_s: float
    transactions_per_operation: float
    delay_p50_ms: float
    delay_p95_ms: float
    postgres_cores: float
    nodes_cores: float

    @property
    def kept_up(self) -> bool:
        """Whether what was offered was done."""
        return self.done_per_s >= KEPT_UP * self.offered_per_s


@contextmanager
def counting() -> Generator[Sent]:
    """Count what this process sends meanwhile."""
    sent = Sent()

    def statement(*_: Any) -> None:
        sent.statements += 1

    def transaction(*_: Any) -> None:
        sent.transactions += 1

    event.listen(Engine, "before_cursor_execute", statement)
    event.listen(Engine, "begin", transaction)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", statement)
        event.remove(Engine, "begin", transaction)


async def cost(what: str, number: int, work: Callable[[], Awaitable[object]]) -> Cost:
    """What something costs that `work` does so often."""
    with counting() as sent:
        await work()
    return Cost(what, sent.statements / number, sent.transactions / number)


# -- counts ----------------------------------------------------------------------------------------


async def counts(place: str) -> list[Cost]:
    """What each thing that a node does costs the database."""
    async with node(place, "counted", QUIET_LEASE_S) as one:
        found = [*await training_costs(one), *await session_costs(one)]
    return [*found, await idle_cost(place)]


async def training_costs(one: InProcessNode) -> list[Cost]:
    """Operations of one run, of many runs at once, and a new run."""
    runs = [await new_run(one) for _ in range(AT_ONCE)]
    for run in runs:
        await operation(one, run, 1)

    async def in_turn() -> None:
        for seq_id in range(2, REPEATS + 2):
            await operation(one, runs[0], seq_id)

    async def together() -> None:
        await asyncio.gather(*(operation(one, run, 2) for run in runs[1:]))

    return [
        await cost("training operation", REPEATS, in_turn),
        await cost("training operation, 31 runs at once", AT_ONCE - 1, together),
        await cost("new run with its session", 1, lambda: new_run(one)),
    ]


async def session_costs(one: InProcessNode) -> list[Cost]:
    """Samples and heartbeats; what is written later is counted, too."""
    session_id = (await one.post("create_session", {"tags": [], "sdk_version": ""}))["session_id"]
    asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await one.post("create_sampling_session", asked))["sampling_session_id"]
    await sample(one, sampler, 0)

    async def samples() -> None:
        for number in range(1, REPEATS + 1):
            await sample(one, sampler, number)
        await one.write_all()

    async def heartbeats() -> None:
        for _ in range(REPEATS):
            await one.post("session_heartbeat", {"session_id": session_id})
        await one.write_all()

    return [
        await cost("sample", REPEATS, samples),
        await cost("heartbeat", REPEATS, heartbeats),
    ]


async def idle_cost(place: str) -> Cost:
    """A node without work."""
    async with store_of_node(place, "idle", QUIET_LEASE_S) as store:
        await look(store, node_id("idle"), QUIET_LEASE_S)  # opens the connection for listings
        once = look(store, node_id("idle"), QUIET_LEASE_S)
        return await cost("idle node, every third of a lease", 1, lambda: once)


async def new_run(one: InProcessNode) -> str:
    """A run of a client without sessions: it stays on the node that was asked."""
    body = {"base_model": MODEL, "lora_config": {"rank": 2}}
    accepted = await one.post("create_model", body)
    return (await one.result(accepted["request_id"]))["model_id"]


async def operation(one: InProcessNode, run: str, seq_id: int) -> None:
    """An optimizer step, waited for."""
    body = {"model_id": run, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}
    accepted = await one.post("optim_step", body)
    await one.result(accepted["request_id"])


async def sample(one: InProcessNode, sampler: str, seq_id: int) -> None:
    """One sample of one token, waited for."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    params = {"max_tokens": 1, "seed": 1}
    asked = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}
    accepted = await one.post("asample", {**asked, "seq_id": seq_id})
    await one.result(accepted["request_id"])


async def look(store: SqlStore, name: str, lease_s: float) -> None:
    """What a node does every third of a lease."""
    await store.renew(lease_s, NodeLoad())
    await store.nodes()
    await store.claims([name])


async def connections(place: str, count: int) -> float:
    """Connections to the database for each node."""
    async with AsyncExitStack() as stack:
        for number in range(count):
            await stack.enter_async_context(node(place, f"n{number}", LEASE_S))
        # The second connection is opened by the first listing.
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tinkex'"
        with psycopg.connect(place) as connection:
            row = connection.execute(query).fetchone()
    assert row is not None
    return row[0] / count


# -- load ------------------------------------------------------------------------------------------


class Simulated:
    """The stores of many nodes, with the sessions that they own spread evenly."""

    def __init__(self, stores: list[SqlStore], sessions: int) -> None:
        self._stores = stores
        self._sessions = sessions
        # Mutable state: operations so far, and the delays of those that have ended.
        self._numbers = [1] * sessions
        self.delays_s: list[float] = []

    async def begin(self) -> None:
        """One session with one run for each."""
        for number in range(self._sessions):
            store, run = self._store(number), self._run(number)
            await store.put_session(session(f"s{number}"))
            claim = await store.claim(run, self._node_id(number), owner="o", base_model="b")
            await store.adopt(claim)
            await store.put_model(model(run))

    def _store(self, number: int) -> SqlStore:
        return self._stores[number % len(self._stores)]

    def _node_id(self, number: int) -> str:
        return node_id(f"n{number % len(self._stores)}")

    def _run(self, number: int) -> str:
        return f"s{number}:train:0"

    async def offer(self, per_s: float, seconds: float) -> float:
        """Send operations at a rate, and everything else that nodes send; returns the rate done."""
        self.delays_s = []
        began = time.monotonic()
        ends = began + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self._sessions):
                group.create_task(self._train(number, self._sessions / per_s, began, ends))
            for number in range(len(self._stores)):
                group.create_task(self._live(number, began, ends))
        return len(self.delays_s) / (time.monotonic() - began)

    async def _train(self, number: int, every_s: float, began: float, ends: float) -> None:
        """One session: an operation when it is due, unless the one before is still under way."""
        store, run = self._store(number), self._run(number)
        due = began + every_s * (number / self._sessions)
        beat = began + HEARTBEAT_S * (number / self._sessions)
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > ends:
                return
            if time.monotonic() >= beat:
                beat += HEARTBEAT_S
                await store.touch_session(f"s{number}", time.time())
            await self._one(store, run, number, due)
            due += every_s

    async def _one(self, store: SqlStore, run: str, number: int, due: float) -> None:
        seq_id = self._numbers[number]
        self._numbers[number] += 1
        work = step(seq_id, run, body=BODY)
        await store.submit(work)
        await store.start([work.op_id], time.time())
        await store.finish(work.op_id, DONE, time.time(), used(time.time()))
        self.delays_s.append(time.monotonic() - due)

    async def _live(self, number: int, began: float, ends: float) -> None:
        """A node's renewals, each node at its own moment."""
        store, name = self._stores[number], node_id(f"n{number}")
        due = began + number / len(self._stores) * LEASE_S / 3
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await look(store, name, LEASE_S)
            due += LEASE_S / 3


async def load(
    postgres: PostgresServer, nodes: int, sessions: int, rates: list[float], seconds: float
) -> list[Load]:
    """Rates until one cannot be kept up."""
    place = postgres.new_place()
    rows: list[Load] = []
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(store_of_node(place, f"n{number}", LEASE_S))
            for number in range(nodes)
        ]
        simulated = Simulated(stores, sessions)
        await simulated.begin()
        for rate in rates:
            before, mine = cpu_s(postgres.pid), time.process_time()
            began = time.monotonic()
            with counting() as sent:
                done = await simulated.offer(rate, seconds)
            lasted = time.monotonic() - began
            delays = sorted(simulated.delays_s)
            rows.append(
                Load(
                    offered_per_s=rate,
                    done_per_s=done,
                    transactions_per_operation=sent.transactions / len(delays),
                    delay_p50_ms=1000 * statistics.median(delays),
                    delay_p95_ms=1000 * delays[int(0.95 * len(delays))],
                    postgres_cores=(cpu_s(postgres.pid) - before) / lasted,
                    nodes_cores=(time.process_time() - mine) / lasted,
                )
            )
            if not rows[-1].kept_up:
                break
    return rows


def cpu_s(pid: int) -> float:
    """CPU time of a process and of all below it, those that have ended included."""
    total = 0
    for each in (pid, *children(pid)):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # has just ended, and counts with its parent from now on
            continue
        total += sum(map(int, fields[11:15] if each == pid else fields[11:13]))
    return total / _TICKS


async def measured(
    postgres: PostgresServer, options: argparse.Namespace
) -> tuple[list[Cost], float, list[Load]]:
    """Everything, one part after the other."""
    costs = await counts(postgres.new_place())
    per_node = await connections(postgres.new_place(), 3)
    rates = [options.first_rate * 2**n for n in range(options.rates)]
    rows = await load(postgres, options.nodes, options.sessions, rates, options.seconds)
    return costs, per_node, rows


def main() -> int:
    """Measure and print; there is no bar."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster.database", description=__doc__)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--first-rate", type=float, default=50.0)
    parser.add_argument("--rates", type=int, default=8)
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at every commit")
    options = parser.parse_args()
    with postgres_server() as postgres:
        # Three connections for each node, and a few for this program.
        postgres.execute(f"ALTER SYSTEM SET max_connections = {3 * options.nodes + 20}")
        if options.fsync:
            postgres.execute("ALTER SYSTEM SET fsync = on")
        postgres.stop()
        postgres.start()
        costs, per_node, rows = asyncio.run(measured(postgres, options))
    print(f"{'what':44} statements  transactions")
    for each in costs:
        print(f"{each.what:44} {each.statements:10.2f} {each.transactions:13.2f}")
    print(f"connections per node: {per_node:g}")
    disk = "with" if options.fsync else "without"
    print(f"\n{options.nodes} nodes, {options.sessions} sessions, {disk} waiting for the disk")
    print("offered/s   done/s  transactions/op  p50 ms  p95 ms  cores: database  nodes")
    for row in rows:
        print(
            f"{row.offered_per_s:9.0f} {row.done_per_s:8.1f} "
            f"{row.transactions_per_operation:16.2f} {row.delay_p50_ms:7.1f} "
            f"{row.delay_p95_ms:7.1f} {row.postgres_cores:16.2f} {row.nodes_cores:6.2f}"
        )
    best = max(rows, key=lambda row: row.done_per_s)
    share = best.postgres_cores / (best.postgres_cores + best.nodes_cores)
    print(
        f"at most {best.done_per_s:.0f} operations/s; the database used {share:.0%} of the CPU, "
        f"{1000 * best.postgres_cores / best.done_per_s:.2f} ms for each operation"
    )
    print(f"measured on {machine()}")
    about = {"benchmark": "cluster_database", "commit": commit(), "hardware": hardware()}
    result = {
        "costs": [asdict(each) for each in costs],
        "connections_per_node": per_node,
        "load": [asdict(row) for row in rows],
    }
    sizes = {
        "nodes": options.nodes,
        "sessions": options.sessions,
        "lease_s": LEASE_S,
        "fsync": options.fsync,
    }
    print(json.dumps({**about, **sizes, **result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
