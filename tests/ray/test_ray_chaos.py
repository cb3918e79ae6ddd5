"""Nodes, raylets, engines and Ray's head are lost while three tenants work.

In the end every loop was told the same, and has saved the same bytes, as on a server of its own.
"""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pytest

from tests.cluster.disturbances import Disturber, check_records, planned
from tests.cluster.test_chaos import calm, in_bucket, saved
from tests.contracts.conftest import postgres
from tests.e2e.killing import Relay
from tests.e2e.serving import children
from tests.e2e.test_durability import run
from tests.patience import until
from tests.ray.real_nodes import ray_nodes
from tests.s3 import bucket, s3_environment, s3_url

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator
    from pathlib import Path

    from tests.cluster.disturbances import Disturbance
    from tests.contracts.postgres import PostgresServer
    from tests.ray.real_nodes import RayNodes

pytest.importorskip("ray")
_log = logging.getLogger(__name__)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]
__all__ = ["bucket", "calm", "postgres", "s3_environment", "s3_url"]

Kind = Literal["node", "machine", "raylet", "engine", "connections", "freeze", "head"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TENANTS = {"alice": "tinkex", "bob": "tinker", "carol": "tinkex"}
MOST_ROUNDS = 50
# With the short case, fifty moments.
SEEDS = range(1, 8)


class MainThread:
    """Runs in the test's own thread what other threads hand over: Ray's tests work only there."""

    def __init__(self) -> None:
        self._handed: SimpleQueue[tuple[Future[None], partial[None]]] = SimpleQueue()

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self._handed.put((future, partial(call, *args)))
        return future

    def work_until(self, done: Callable[[], bool]) -> None:
        """Do what is handed over until something is true; raises what went wrong with it."""
        while not done():
            with suppress(Empty):
                future, call = self._handed.get(timeout=0.2)
                _log.info("begins: %s", call.args)
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
                    raise

    def shutdown(self) -> None:
        """Nothing is left to end."""


class RayDisturber(Disturber):
    """What happens to nodes that Ray supervises: it is Ray that brings them back."""

    cluster: RayNodes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hands.shutdown()
        self._hands = self.main_thread = MainThread()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def is_over(self) -> bool:
        """Whether everything has happened, and nothing is under way."""
        with self._lock:
            busy = self._under_way is not None and not self._under_way.done()
            return not self.moments and not busy

    @property
    def port(self) -> int:
        return self.cluster.port

    def _victim(self, moment: Disturbance) -> str:
        names = sorted(self.cluster.alive())
        return names[int(moment.which * len(names))]

    def _lost(self, name: str) -> str:
        """The id under which a node is alive now."""
        return self.cluster.alive()[name]

    def _pid(self, name: str) -> int:
        pid = self.cluster.pid(name)
        assert pid is not None, f"node {name} does not run"
        return pid

    def _node(self, moment: Disturbance, begun: threading.Event) -> None:
        """The process of a node is lost; its actor starts it again."""
        name = self._victim(moment)
        lost = self._lost(name)
        os.kill(self._pid(name), signal.SIGKILL)
        begun.set()
        self.cluster.wait_for_others_than({lost})

    def _machine(self, moment: Disturbance, begun: threading.Event) -> None:
        """A machine is lost; Ray starts its nodes on another one."""
        self._lose_machine(moment, begun, raylet_only=False)

    def _raylet(self, moment: Disturbance, begun: threading.Event) -> None:
        """Only the raylet is lost: what it has started must end, too."""
        self._lose_machine(moment, begun, raylet_only=True)

    def _lose_machine(
        self, moment: Disturbance, begun: threading.Event, *, raylet_only: bool
    ) -> None:
        name = self._victim(moment)
        lost = self._lost(name)
        begun.set()
        self.cluster.lose(self.cluster.machine_of(name), raylet_only=raylet_only)
        self.cluster.wait_for_others_than({lost})

    def _engine(self, moment: Disturbance, begun: threading.Event) -> None:
        """The engine's process of a node is lost; the node starts another."""
        for pid in children(self._pid(self._victim(moment))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        begun.set()

    def _freeze(self, moment: Disturbance, begun: threading.Event) -> None:
        """A node stops for longer than its lease: it ends by itself, and is started again."""
        name = self._victim(moment)
        lost, pid = self._lost(name), self._pid(name)
        os.kill(pid, signal.SIGSTOP)
        begun.set()
        dead = f"SELECT 1 FROM nodes WHERE node_id = '{lost}' AND state = 'dead'"
        try:
            until(lambda: self.cluster.query(dead), f"{lost} was not declared dead")
        finally:
            os.kill(pid, signal.SIGCONT)
        self.cluster.wait_for_others_than({lost})

    def _head(self, moment: Disturbance, begun: threading.Event) -> None:
        """Ray's head is lost, so all of Ray ends; an operator starts Ray and the nodes again."""
        lost = set(self.cluster.alive().values())
        begun.set()
        self.cluster.lose_head()
        self.cluster.start_ray()
        self.cluster.up()
        self.cluster.wait_for_others_than(lost)


@contextmanager
def disturbed(nodes: RayNodes, moments: list[Disturbance]) -> Generator[tuple[RayDisturber, str]]:
    """The nodes, disturbed at these moments, and the address that stays."""
    disturber = RayDisturber(nodes, "", list(moments))
    # Official clients send a request again ten times, and Ray may take minutes to start again.
    relay = Relay(disturber, held_s=30.0)
    relay.start()
    try:
        yield disturber, f"http://127.0.0.1:{relay.port}"
    finally:
        relay.stop()
        disturber.close()


def disturb(
    folder: Path, database: str, place: str, calm: tuple[Any, Any], moments: list[Disturbance]
) -> None:
    """Loops of three tenants, each again and again until everything has happened."""
    with ray_nodes(folder, database, f"s3://{place}") as nodes:
        keys = {owner: nodes.tinkex("key", "create", "--owner", owner).strip() for owner in TENANTS}
        nodes.up()
        with disturbed(nodes, moments) as (disturber, url), ThreadPoolExecutor() as pool:

            def work(owner: str) -> int:
                rounds = 0
                while rounds < MOST_ROUNDS and not disturber.is_over:
                    told = run(TENANTS[owner], url, folder, keys[owner])
                    assert (owner, told) == (owner, calm[0])
                    rounds += 1
                return rounds

            loops = [pool.submit(work, owner) for owner in TENANTS]
            try:
                disturber.main_thread.work_until(lambda: all(map(Future.done, loops)))
            finally:
                left, disturber.moments = disturber.moments, []  # then the loops end
            rounds = sum(loop.result() for loop in loops)
            assert (disturber.done, left) == (moments, [])
        _nothing_is_missing(nodes, place, calm, rounds)
        nodes.down()


def _nothing_is_missing(nodes: RayNodes, place: str, calm: tuple[Any, Any], rounds: int) -> None:
    assert saved(in_bucket(place)) == calm[1]
    check_records(nodes)
    count = "SELECT count(*) FROM checkpoints WHERE name LIKE 'm%-step-%'"
    assert nodes.query(count) == [(10 * rounds,)]
    # Two models of each loop have published weights at two of their steps.
    assert nodes.query("SELECT count(*) FROM samplers") == [(4 * rounds,)]


def _moments(seed: int, *kinds: Kind) -> list[Disturbance]:
    return planned(seed, *cast("Any", kinds))


@pytest.mark.timeout(600)
def test_the_loss_of_a_machine_is_not_noticed(
    tmp_path: Path, postgres: PostgresServer, calm: tuple[Any, Any], bucket: str
) -> None:
    disturb(tmp_path, postgres.new_place(), f"{bucket}/w", calm, _moments(0, "machine"))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_disturbed_in_every_way_tenants_are_told_the_same(
    tmp_path: Path, postgres: PostgresServer, calm: tuple[Any, Any], bucket: str, seed: int
) -> None:
    disturb(tmp_path, postgres.new_place(), f"{bucket}/w", calm, _moments(seed, *KINDS))
