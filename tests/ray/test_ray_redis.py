"""Ray's head keeps its state in Redis: it is lost and started again, and nodes continue to serve.

The head is started by the command of the how-to page about clusters, on loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import tinkex
from tests.cluster.loopback import Machine, stand_ins
from tests.contracts.conftest import postgres
from tests.docs.blocks import blocks_of
from tests.e2e.serving import (
    MODEL,
    children,
    environment,
    reserved_port,
    served,
    wait_gone,
)
from tests.e2e.workers import losses
from tests.patience import PATIENCE_S, until
from tests.ray.raylets import ask, is_running, mentions, parent
from tests.ray.real_nodes import command_line
from tests.ray.test_ray_page import PAGE, port, short

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

pytest.importorskip("ray")
REDIS = shutil.which("redis-server")
pytestmark = [
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3 * PATIENCE_S),
]
__all__ = ["port", "postgres", "short"]

# Not the marker of other tests, which look for it in the command lines of all processes.
_WORDS = ("of-redis", "of-the-machine", "that-up-passes")
REDIS_PASSWORD, SET, PASSED = (f"m4rk3r-{os.getpid()}-{word}" for word in _WORDS)
HEAD, OTHER = "10.0.0.11", "10.0.0.12"
# `ray` as it is, but small, with its files in a folder of the test and more time than 60 s for the
# head's restart.
RAY = """#!/bin/sh
export RAY_gcs_rpc_server_reconnect_timeout_s={patience_s:.0f}
case " $* " in
    *" --head "*) more="--num-cpus=$HEAD_CPUS --include-dashboard=false --temp-dir={folder}/r";;
    *) more=--num-cpus=2;;
esac
exec {python} -m ray.scripts.scripts "$@" --object-store-memory=83886080 --disable-usage-stats $more
"""


@dataclass
class Redis:
    """A Redis server with a password."""

    folder: Path
    port: int

    def stored(self) -> bytes:
        """All its keys and values."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            connection.sendall(f"AUTH {REDIS_PASSWORD}\r\nSAVE\r\nQUIT\r\n".encode())
            replies = b"".join(iter(lambda: connection.recv(4096), b""))
        assert replies == b"+OK\r\n" * 3
        return (self.folder / "dump.rdb").read_bytes()


@pytest.fixture
def redis(tmp_path: Path) -> Generator[Redis]:
    assert REDIS is not None
    folder = tmp_path / "redis"
    folder.mkdir()
    with reserved_port() as port:
        settings = folder / "redis.conf"
        settings.write_text(
            f"bind 127.0.0.1\nport {port}\nrequirepass {REDIS_PASSWORD}\n"
            f'dir {folder}\nsave ""\nrdbcompression no\n'
        )
        with subprocess.Popen([REDIS, settings], stdout=subprocess.DEVNULL) as server:
            try:
                until(lambda: _listens(port))
                yield Redis(folder, port)
            finally:
                server.terminate()


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@dataclass
class Lab:
    """The machine of Ray's head, another one, and the shell of an operator."""

    folder: Path
    head: Machine
    other: Machine
    operator: Machine
    # Mutable state: the page's command that runs the head.
    process: subprocess.Popen[bytes] | None = None

    def start(self, head_cpus: int) -> None:
        """Start Ray on both machines."""
        self.head.run(f"export HEAD_CPUS={head_cpus}")
        self.start_head()
        self.other.run(_command(f"ray start --address={HEAD}"))

    def start_head(self) -> None:
        """Run the page's command, and return when Ray has started."""
        started = self.folder / "r" / "ray_current_cluster"
        # With this file, `ray start` would take the other machine's raylet for one of the head's.
        started.unlink(missing_ok=True)
        log = self.folder / "head.log"
        with log.open("wb") as output:
            process = self.process = subprocess.Popen(
                [
                    *("bash", "-euc"),
                    self.head.here("\n".join([*self.head.shell, _command("RAY_REDIS_ADDRESS=")])),
                ],
                env=environment(self.head.root, PATH=self.head.path),
                stdout=output,
                stderr=output,
            )
        until(lambda: started.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()

    def lose_head(self) -> None:
        """The head's machine is lost with everything that runs there, nodes included."""
        assert self.process is not None
        _kill([self.process.pid, *children(self.process.pid)])
        self.process.wait()

    def lose_gcs_server(self) -> int:
        """Only the head's server is lost; the exit status of the page's command."""
        assert self.process is not None
        below = children(self.process.pid)
        [server] = [pid for pid in below if b"/gcs_server\0" in command_line(pid)]
        os.kill(server, signal.SIGKILL)
        status = self.process.wait(PATIENCE_S)
        _kill(below)  # Ray's agents look for the server for a minute; systemd ends them like this
        return status

    def cluster(self, words: str) -> dict[str, Any]:
        """What `tinkex cluster` prints."""
        return json.loads(self.operator.run(f"tinkex -f json cluster {words}"))

    def up(self, nodes: str) -> dict[str, Any]:
        """Start nodes; returns all of them by name."""
        patience = f"--start-timeout {PATIENCE_S} --placement-timeout {PATIENCE_S}"
        found = self.cluster(f"up --name lab --address {HEAD}:6379 {nodes} {patience}")["nodes"]
        assert {node["state"] for node in found} == {"ready"}
        return {node["name"]: node for node in found}

    def down(self) -> int:
        """Stop all nodes; returns how many."""
        return self.cluster(f"down --name lab --address {HEAD}:6379")["stopped"]

    def logs(self) -> bytes:
        """Everything that Ray and the nodes have logged."""
        files = [path for path in self.folder.rglob("logs/**/*") if path.is_file()]
        return b"".join(path.read_bytes() for path in (self.folder / "head.log", *files))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_gone(pid, PATIENCE_S)


def _command(beginning: str) -> str:
    """The page's command that begins like this."""
    lines = [line for block in blocks_of(PAGE) for line in block.text.splitlines()]
    (command,) = [line for line in lines if line.startswith(beginning)]
    return command


@pytest.fixture
def lab(
    tmp_path: Path, short: Path, redis: Redis, port: int, monkeypatch: pytest.MonkeyPatch
) -> Generator[Lab]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = {
        "10.0.0.10:6379": f"127.0.0.1:{redis.port}",
        "change-me": REDIS_PASSWORD,
        "10.0.0.": "127.0.0.",
        "6379": str(port),
    }
    path = stand_ins(tmp_path / "bin", "false")
    ray = tmp_path / "bin" / "ray"
    ray.write_text(RAY.format(folder=short, python=sys.executable, patience_s=PATIENCE_S))
    ray.chmod(0o755)

    def machine(name: str) -> Machine:
        (tmp_path / name).mkdir()
        return Machine(name, tmp_path / name, words, path)

    found = Lab(short, machine(HEAD), machine(OTHER), machine("operator"))
    yield found
    if found.process is not None and found.process.poll() is None:
        found.lose_head()


@pytest.fixture
def events(lab: Lab, tmp_path: Path) -> Path:
    """Lets `up` start fake nodes; the file of their events."""
    program = f'exec {sys.executable} -m tests.ray.cluster_command "$@"'
    (tmp_path / "bin" / "tinkex").write_text(f"#!/bin/sh\n{program}\n")
    lab.operator.run(f"export TINKEX_FAKE_EVENTS={tmp_path / 'events'}")
    return tmp_path / "events"


@contextmanager
def asked_throughout(nodes: dict[str, Any]) -> Generator[None]:
    """Nodes answer all the time, and each is one process."""
    over = threading.Event()

    def pids(url: str) -> set[int]:
        found = {ask(url)["pid"]}
        while not over.wait(0.05):
            found.add(ask(url)["pid"])
        return found

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(pids, node["url"]) for node in nodes.values()]
        try:
            yield
        finally:
            over.set()
    assert [len(future.result()) for future in asked] == [1] * len(nodes)


def test_nodes_outlive_the_head_and_are_supervised_when_it_is_back(lab: Lab, events: Path) -> None:
    def started() -> int:
        return events.read_text().count("started")

    lab.operator.run("export TINKEX_DATABASE=postgresql:///db")
    # One node needs the head's machine, and two the other one.
    lab.start(head_cpus=1)
    nodes = "--cpu-nodes fake/model=3"
    before = lab.up(nodes)
    [lost] = [name for name, node in before.items() if node["machine"] == "127.0.0.11"]
    others = {name: node for name, node in before.items() if name != lost}
    with asked_throughout(others):
        lab.lose_head()
        lab.start_head()
        until(lambda: started() == 4)  # the node of the head's machine
        after = lab.up(nodes)
        assert {name: after[name] for name in others} == others

    first, second = others
    with suppress(OSError):
        ask(after[first]["url"], "/exit/1")
    os.kill(parent(ask(after[second]["url"])["pid"]), signal.SIGKILL)
    until(lambda: started() == 6)
    again = lab.up(nodes)
    assert again[first]["starts"] == 2
    assert again[second]["url"] != after[second]["url"]
    assert again[lost] == after[lost]
    pids = [ask(node["url"])["pid"] for node in again.values()]
    assert lab.down() == 3
    assert not any(map(is_running, pids))


def test_secrets_are_in_redis_only_if_up_passes_them_and_until_down(
    lab: Lab, redis: Redis, events: Path
) -> None:
    set_here, passed = (f"postgresql://user:{word}@127.0.0.1/db" for word in (SET, PASSED))
    lab.other.run(f"export TINKEX_DATABASE={set_here}")
    lab.start(head_cpus=0)
    [(name, node)] = lab.up("--cpu-nodes fake/model=1").items()
    assert ask(node["url"])["database"] == set_here
    assert name.encode() in redis.stored()
    assert SET.encode() not in redis.stored()

    [node] = lab.up(f"--cpu-nodes fake/model=1 --database {passed}").values()
    assert ask(node["url"])["database"] == passed
    assert PASSED.encode() in redis.stored()
    assert not [*mentions(SET), *mentions(PASSED)]

    # Ray passes Redis's password on as a flag, but only on the head's machine.
    shown = [line for line in mentions(REDIS_PASSWORD) if str(lab.folder) in line]
    assert any("/gcs_server\0" in line for line in shown)
    assert not [line for line in shown if "127.0.0.12" in line]

    assert lab.down() == 1
    until(lambda: PASSED.encode() not in redis.stored())
    assert b"postgresql://user:***@" in lab.logs()
    for word in (SET, PASSED, REDIS_PASSWORD):
        assert word.encode() not in redis.stored() + lab.logs(), word


@pytest.mark.exhaustive
def test_a_run_continues_with_the_same_losses_while_the_head_is_away(
    lab: Lab, tmp_path: Path, postgres: PostgresServer
) -> None:
    settings = {
        "TINKEX_DATABASE": f"'{postgres.new_place()}'",
        "TINKEX_ARTIFACTS": f"file://{tmp_path / 'weights'}",
        "TINKEX_THREADS": "1",
        # No node is lost, and a busy machine must not make one silent.
        "TINKEX_LEASE_S": str(PATIENCE_S),
    }
    for name, value in settings.items():
        lab.operator.run(f"export {name}={value}")
    lab.start(head_cpus=0)
    key = lab.operator.run("tinkex key create --owner alice").strip()
    nodes = f"--cpu-nodes {MODEL}=1 --api-nodes 1"
    before = lab.up(nodes)
    ids = _ids(lab)
    with tinkex.ServiceClient(base_url=before["api-0"]["url"], api_key=key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        seen = losses(training, 3)
        assert lab.lose_gcs_server() == 1
        seen += losses(training, 3)
        lab.start_head()
        seen += losses(training, 3)
    assert lab.up(nodes) == before
    assert _ids(lab) == ids
    assert lab.down() == 2
    assert _ids(lab) == {}
    with (
        served(tmp_path / "alone") as server,
        tinkex.ServiceClient(base_url=server.url, api_key="tml-alone") as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        assert losses(training, 9) == seen


def _ids(lab: Lab) -> dict[str, str]:
    """The ids of the nodes that `status` shows as alive, by name."""
    nodes = lab.cluster("status")["nodes"]
    return {node["name"]: node["node_id"] for node in nodes if node["state"] == "alive"}
