"""What happens to the nodes of a cluster while clients work, and what must hold in the end.

Clients talk to a relay in front of a node without an engine. It counts their requests and, at
moments that a seed has chosen, disturbs one of the other nodes. What is to be found out in the end
is recorded by triggers in the database, so no node can leave it out.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import anyio
import psycopg

from tests.e2e.killing import Relay
from tests.e2e.serving import children, environment
from tests.patience import PATIENCE_S, until
from tinkex.clock import SystemClock
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Future

    from tests.cluster.nodes import Cluster

Kind = Literal["node", "engine", "freeze", "connections", "terminate", "move"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEASE_LOST = 75


@dataclass(frozen=True)
class Disturbance:
    """After so many more requests: what happens, to which node or key (of those that there are)."""

    requests: int
    kind: Kind
    which: float
    first_passed_on: bool


def planned(seed: int, *kinds: Kind) -> list[Disturbance]:
    """Moments for these kinds, in an order chosen by the seed."""
    chosen = random.Random(seed)
    order = list(kinds)
    chosen.shuffle(order)
    return [
        Disturbance(chosen.randint(3, 30), kind, chosen.random(), chosen.random() < 0.5)
        for kind in order
    ]


RECORD = """
CREATE TABLE seen_claims (at timestamptz DEFAULT clock_timestamp(), what text, key text,
                          node_id text, epoch int);
CREATE TABLE seen_ends (op_id text, model_id text, seq_id bigint, epoch int, claimed int);
CREATE FUNCTION see_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'DELETE' THEN
    INSERT INTO seen_claims (what, key, node_id, epoch)
      VALUES (TG_OP, OLD.key, OLD.node_id, OLD.epoch);
  ELSE
    INSERT INTO seen_claims (what, key, node_id, epoch)
      VALUES (TG_OP, NEW.key, NEW.node_id, NEW.epoch);
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION see_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.state = 'done' THEN
    INSERT INTO seen_ends VALUES (NEW.op_id, NEW.model_id, NEW.seq_id, NEW.epoch,
      (SELECT epoch FROM claims WHERE key = NEW.model_id));
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER see_claim AFTER INSERT OR UPDATE OR DELETE ON claims
  FOR EACH ROW EXECUTE FUNCTION see_claim();
CREATE TRIGGER see_end AFTER INSERT OR UPDATE ON operations
  FOR EACH ROW EXECUTE FUNCTION see_end();
"""


@dataclass
class Disturber:
    """Nodes that are disturbed one after the other, behind a node that is not."""

    cluster: Cluster
    gateway: str
    moments: list[Disturbance]
    flags: tuple[str, ...] = ()
    done: list[Disturbance] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Mutable state: requests since the last disturbance, and the one under way.
        self._seen = 0
        self._lock = threading.Lock()
        self._hands = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None
        with psycopg.connect(self.cluster.database, autocommit=True) as connection:
            connection.execute(RECORD.encode())

    @property
    def port(self) -> int:
        """Where the gateway listens."""
        return int(self.cluster.nodes[self.gateway].port)

    def count(self) -> Disturbance | None:
        """One more request; the moment that has come with it, if one has."""
        with self._lock:
            busy = self._under_way is not None and not self._under_way.done()
            if not self.moments or busy:
                return None
            self._seen += 1
            if self._seen < self.moments[0].requests:
                return None
            self._seen = 0
            self.settle()
            moment = self.moments.pop(0)
            begun = threading.Event()
            self._under_way = self._hands.submit(self._disturb, moment, begun)
        begun.wait(PATIENCE_S)
        return moment

    def kill(self, moment: Disturbance) -> None:
        """It has begun already; the relay goes on."""

    def settle(self) -> None:
        """Wait for the end of what is under way; raises what went wrong with it."""
        if self._under_way is not None:
            self._under_way.result(PATIENCE_S)

    def close(self) -> None:
        self._hands.shutdown()

    def _disturb(self, moment: Disturbance, begun: threading.Event) -> None:
        try:
            getattr(self, f"_{moment.kind}")(moment, begun)
            self.done.append(moment)
        finally:
            begun.set()

    def _victim(self, moment: Disturbance) -> str:
        names = sorted(name for name in self.cluster.nodes if name != self.gateway)
        return names[int(moment.which * len(names))]

    def _again(self, name: str) -> None:
        """Start a node under the name that it had."""
        self.cluster.start(name, *self.flags)
        self._wait_until_serving(name)

    def _wait_until_serving(self, name: str) -> None:
        ready = (
            f"SELECT 1 FROM nodes WHERE name = '{name}' AND state = 'alive' "
            "AND base_models::text LIKE '%tiny%'"
        )
        until(lambda: self.cluster.query(ready), f"node {name} does not serve")

    def _node(self, moment: Disturbance, begun: threading.Event) -> None:
        """The loss of a machine."""
        name = self._victim(moment)
        self.cluster.kill(name)
        begun.set()
        self._again(name)

    def _engine(self, moment: Disturbance, begun: threading.Event) -> None:
        """The engine's process is lost; the node starts another."""
        for pid in children(self.cluster.nodes[self._victim(moment)].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        begun.set()

    def _freeze(self, moment: Disturbance, begun: threading.Event) -> None:
        """A node stops for longer than its lease, and continues: it must end by itself."""
        name = self._victim(moment)
        served = self.cluster.nodes[name]
        # The last one: the node of the same name before it may not have been declared dead yet.
        ((node_id,),) = self.cluster.query(
            f"SELECT node_id FROM nodes WHERE name = '{name}' AND state = 'alive' "
            "ORDER BY number DESC LIMIT 1"
        )
        self.cluster.freeze(name)
        begun.set()
        dead = f"SELECT 1 FROM nodes WHERE node_id = '{node_id}' AND state = 'dead'"
        try:
            until(lambda: self.cluster.query(dead), f"{node_id} was not declared dead")
        finally:
            os.kill(served.pid, signal.SIGCONT)
        status = served.popen.wait(PATIENCE_S)
        assert status == LEASE_LOST, f"node {name} ended with {status}"
        self._again(name)

    def _connections(self, moment: Disturbance, begun: threading.Event) -> None:
        """A node loses all its connections to the database."""
        name = self._victim(moment)
        ends = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE application_name = 'node-{name}'"
        )
        assert self.cluster.query(ends)
        begun.set()

    def _terminate(self, moment: Disturbance, begun: threading.Event) -> None:
        """An operator stops a node: it hands over what it owns."""
        name = self._victim(moment)
        served = self.cluster.nodes[name]
        served.popen.terminate()
        begun.set()
        status = served.popen.wait(PATIENCE_S)
        assert status == 0, f"node {name} ended with {status}"
        self._again(name)

    def _move(self, moment: Disturbance, begun: threading.Event) -> None:
        """An operator moves a key to another node."""
        move_a_key(self.cluster, moment.which)
        begun.set()


def move_a_key(cluster: Cluster, which: float) -> str | None:
    """Ask for the move of one of the keys to another node, as `tinkex cluster move` does."""
    nodes = [
        node_id
        for (node_id,) in cluster.query(
            "SELECT node_id FROM nodes WHERE state = 'alive' AND role = 'full' ORDER BY number"
        )
    ]
    keys = cluster.query("SELECT key, node_id FROM claims ORDER BY key")
    if not keys:
        return None
    key, owner = keys[int(which * len(keys))]
    others = [node_id for node_id in nodes if node_id != owner]
    if others:
        anyio.run(want, cluster.database, key, others[int(which * 1000) % len(others)])
    return key


def run(cluster: Cluster, *command: str) -> str:
    """What a command of the operator prints, on the cluster's database."""
    done = subprocess.run(
        [sys.executable, "-m", "tinkex.cli", *command, "--database", cluster.database],
        env=environment(cluster.folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


async def want(database: str, key: str, node_id: str) -> None:
    """Ask for a move, as `tinkex cluster move` does."""
    async with SqlStore.open(database, clock=SystemClock()) as store:
        await store.want(key, node_id)


@contextmanager
def disturbed(
    cluster: Cluster, gateway: str, moments: list[Disturbance]
) -> Generator[tuple[Disturber, str]]:
    """A cluster whose nodes are disturbed, and the address that stays."""
    disturber = Disturber(cluster, gateway, list(moments))
    relay = Relay(disturber)
    relay.start()
    try:
        yield disturber, f"http://127.0.0.1:{relay.port}"
    finally:
        relay.stop()
        disturber.close()


def check_records(cluster: Cluster) -> None:
    """Nothing is unfinished, nothing ended twice, and no key had two owners at a time."""
    query: Any = cluster.query
    assert query("SELECT op_id, state FROM operations WHERE state <> 'done'") == []
    assert query("SELECT op_id FROM seen_ends GROUP BY op_id HAVING count(*) > 1") == []
    assert query("SELECT * FROM seen_ends WHERE model_id IS NOT NULL AND epoch IS NULL") == []
    assert query("SELECT * FROM seen_ends WHERE epoch IS DISTINCT FROM claimed") == []
    went_down = (
        "SELECT * FROM (SELECT model_id, seq_id, epoch, lag(epoch) OVER "
        "(PARTITION BY model_id ORDER BY seq_id) AS before FROM operations) o WHERE epoch < before"
    )
    assert query(went_down) == []
    two_nodes = (
        "SELECT key, epoch FROM seen_claims GROUP BY key, epoch HAVING count(DISTINCT node_id) > 1"
    )
    assert query(two_nodes) == []
    skipped = (
        "SELECT * FROM (SELECT key, epoch, lag(epoch) OVER (PARTITION BY key ORDER BY at) AS before"
        " FROM seen_claims) c WHERE epoch < before"
    )
    assert query(skipped) == []
