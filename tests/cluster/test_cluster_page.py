"""Every command and file of the how-to page about clusters, on loopback, with a run under way."""

from __future__ import annotations

import ast
import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.cluster.loopback import Machine, stand_ins
from tests.contracts.postgres import postgres_server
from tests.docs.blocks import DOCS, ROOT, blocks_of
from tests.e2e.serving import MODEL, reserved_port, served
from tests.e2e.workers import datum
from tests.patience import PATIENCE_S
from tests.s3 import bucket, s3_environment, s3_url
from tinkex import AdamParams, ServiceClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contracts.postgres import PostgresServer
    from tests.docs.blocks import Block
    from tinkex import TrainingClient

__all__ = ["bucket", "s3_environment", "s3_url"]

PAGE = DOCS / "how-to" / "cluster.md"
NODES = ("10.0.0.11", "10.0.0.12", "10.0.0.13")
DATABASE = "postgresql://tinkex:change-me@10.0.0.10/tinkex"
# Of one node: for writes, for listings, and for hints.
CONNECTIONS = 3
HERE = f"{Path(__file__).relative_to(ROOT)} runs it"


class Lab:
    """The page's machines, and a training run that is under way while commands run."""

    def __init__(self, folder: Path, words: dict[str, str], path: str) -> None:
        names = ("10.0.0.10", *NODES, "your own machine")
        self.machines = {name: Machine(name, folder / name, words, path) for name in names}
        for machine in self.machines.values():
            machine.root.mkdir()
        self.words = words
        self.training: TrainingClient | None = None
        self.client: ServiceClient | None = None
        self.losses: list[float] = []

    def follow(self, block: Block) -> str:
        """Do what a block of the page says."""
        head, _, rest = block.text.partition("\n")
        file = re.fullmatch(r"# (/etc/\S+) on (.+)", head)
        place = re.fullmatch(r"# on (.+)", head)
        if block.language == "text" and file is not None:
            where = NODES if file[2] == "every machine" else (file[2],)
            for name in where:
                self.machines[name].write(file[1], self._more(file[1], rest))
        elif block.language == "sh" and block.not_run == HERE:
            assert place is not None, f"{block.name} does not say on which machine"
            return self.machines[place[1]].run(rest)
        return ""

    def _more(self, file: str, text: str) -> str:
        """What a test needs beyond the page: its port may be taken, and this machine is busy."""
        if file.endswith("cluster.env"):
            port = self.words[":8000"].removeprefix(":")
            text += f"\nTINKEX_PORT={port}\nTINKEX_LEASE_S=60\nTINKEX_THREADS=1"
        return text

    def train(self) -> None:
        """Two more steps of the run, through the node that owns nothing."""
        if self.training is None:
            url = self.machines[NODES[2]].here(f"http://{NODES[2]}:8000")
            self.client = ServiceClient(base_url=url, api_key=self.words["tml-…"])
            self.training = self.client.create_lora_training_client(MODEL, rank=4, seed=1)
            self.words["MODEL"] = self.training.model_id
        self.losses += steps(self.training, 2)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        for machine in self.machines.values():
            machine.stop(signal.SIGKILL)


def steps(training: TrainingClient, count: int) -> list[float]:
    found: list[float] = []
    for _ in range(count):
        future = training.forward_backward([datum()], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.01))
        found.append(future.result(PATIENCE_S).metrics["loss:sum"])
    return found


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server for this test alone: the page creates a role and a database."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def port() -> Iterator[int]:
    """A port on all addresses of loopback, also while no node runs."""
    with reserved_port("0.0.0.0") as port:
        yield port


@pytest.fixture
def lab(
    tmp_path: Path, own_postgres: PostgresServer, bucket: str, s3_url: str, port: int
) -> Iterator[Lab]:
    words = {
        DATABASE: f"postgresql://tinkex:change-me@/tinkex?host={own_postgres.socket_folder}",
        "http://10.0.0.10:9000": s3_url,
        "s3://tinkex-weights": f"s3://{bucket}",
        "/opt/tinkex/bin/tinkex": str(tmp_path / "bin" / "tinkex"),
        "Qwen/Qwen3-8B": MODEL,
        "TINKEX_DEVICE=cuda": "TINKEX_DEVICE=cpu",
        "10.0.0.": "127.0.0.",
        ":8000": f":{port}",
        "tml-…": "",
        "MODEL": "MODEL",
    }
    path = stand_ins(tmp_path / "bin", own_postgres.psql)
    found = Lab(tmp_path, words, path)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.timeout(3 * PATIENCE_S)
def test_the_pages_commands_run_and_a_run_under_way_keeps_its_bits(
    lab: Lab, tmp_path: Path
) -> None:
    for block in blocks_of(PAGE):
        printed = lab.follow(block)
        if block.not_run != HERE:
            continue
        if "tinkex key create" in block.text:
            lab.words["tml-…"] = printed.strip()
        if "tinkex sample" in block.text:
            _check_connections(lab)
        if "tinkex sample" in block.text or lab.training is not None:
            lab.train()
        if "cluster status --all" in block.text:
            _check_status(printed)
        if "cluster move" in block.text:
            assert f"{lab.words['MODEL']} is on node b." in printed
    assert _owner(lab) == "a"
    _back_to_one_server(lab, tmp_path)
    with served(tmp_path / "alone") as server:
        client = ServiceClient(base_url=server.url, api_key="tml-alone")
        training = client.create_lora_training_client(MODEL, rank=4, seed=1)
        assert steps(training, len(lab.losses)) == lab.losses
        client.close()


def _back_to_one_server(lab: Lab, folder: Path) -> None:
    """The page says that one server continues with what a cluster had, and the other way round."""
    for name in NODES:
        lab.machines[name].stop()
    address = lab.machines[NODES[2]].here(NODES[2])
    flags = ("--host", address, "--port", lab.words[":8000"].removeprefix(":"))
    weights = f"{lab.words['s3://tinkex-weights']}/lab"
    flags = (*flags, "--database", lab.words[DATABASE], "--artifacts", weights)
    with served(folder / "single", *flags, auth=True) as server:
        lab.train()
        server.end()
    for name in (NODES[0], NODES[2]):
        lab.machines[name].run("sudo systemctl start tinkex")
    lab.train()
    assert _owner(lab) == "a"


def _check_connections(lab: Lab) -> None:
    """The explanation says how many connections a node has."""
    query = b"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tinkex'"
    with psycopg.connect(lab.words[DATABASE]) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    assert 0 < row[0] <= CONNECTIONS * len(NODES)
    text = (DOCS / "explanation" / "cluster.md").read_text()
    assert f"{('', 'one', 'two', 'three')[CONNECTIONS]} connections" in text


def _check_status(printed: str) -> None:
    _, _, after = printed.partition('{\n  "nodes"')
    nodes = json.loads('{"nodes"' + after)["nodes"]
    found = {node["name"]: (node["state"], node["role"]) for node in nodes}
    assert found == {"a": ("alive", "full"), "b": ("alive", "full"), "front": ("alive", "api")}


def _owner(lab: Lab) -> str:
    query = b"SELECT n.name FROM claims c JOIN nodes n USING (node_id) WHERE c.key = %s"
    with psycopg.connect(lab.words[DATABASE]) as connection:
        row = connection.execute(query, [lab.words["MODEL"]]).fetchone()
    assert row is not None
    return row[0]


def test_every_command_of_the_page_is_run() -> None:
    shell = [block for block in blocks_of(PAGE) if block.language == "sh"]
    reasons = {block.not_run for block in shell}
    on_ray = {f"tests/ray/test_ray_{name}.py runs it" for name in ("page", "redis")}
    assert reasons == {"installs packages", HERE, *on_ray}
    run = [block for block in shell if block.not_run != "installs packages"]
    machines = [block.text.partition("\n")[0] for block in run]
    assert set(machines) == {f"# on {n}" for n in ("10.0.0.10", *NODES, "your own machine")}


def test_the_messages_that_the_page_explains_are_those_of_the_program() -> None:
    _, _, table = PAGE.read_text().partition("## What to do when\n")
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall("`([^`]+)`", row)]
    known = "\n".join(_texts())
    for message in quoted:
        if message in ("silent", "drain"):
            continue
        parts = [part.strip(" '") for part in re.split("…|'x'", message)]
        pattern = ".*".join(re.escape(part) for part in parts if part)
        assert re.search(pattern, known), message


def _texts() -> Iterator[str]:
    """The texts in the program, a line each, with … for what is put in."""
    for file in (ROOT / "src" / "tinkex").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                yield "".join(map(str, parts)).replace("\n", " ")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("\n", " ")
