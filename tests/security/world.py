"""A real server process with keys and two tenants: one that attacks, one that must not notice.

with world_on(tmp_path) as world:
    with world.watching() as seen:
        world.attacker.post("create_session", {...})
    assert seen.peak_bytes < MOST_BYTES
    world.assert_well()
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.serving import MODEL, START_S, environment, served
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from tests.e2e.serving import Served

MOST_BYTES = 400 << 20
"""What the API process may take, whatever is sent to it."""
MOST_CPU_S = 0.2
"""What one step on the event loop may compute: 0.1 s on a quiet machine, and twice that where two
threads share a core. The bodies that are sent took seconds before they had bounds."""
_PREFIX = "/api/v1/"


@dataclass(frozen=True)
class Answer:
    """What a server replied."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        """Why it was refused."""
        return self.json["detail"]


class Tenant:
    """Somebody with a key; each request has a connection of its own."""

    def __init__(self, port: int, key: str, owner: str) -> None:
        self.port = port
        self.key = key
        self.owner = owner

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request to a path that starts with a slash, or one below `/api/v1/`."""
        target = path if path.startswith("/") else _PREFIX + path
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            given = {"x-api-key": self.key, **(headers or {})}
            connection.request(method, target, body, given)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, members: object, **headers: str) -> Answer:
        """Send JSON; keyword arguments are headers with underscores for hyphens."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps(members).encode()
        return self.request("POST", path, body, {"content-type": "application/json", **given})

    def made(self, path: str, /, **members: object) -> dict[str, Any]:
        """Send JSON that must be accepted; returns the reply."""
        answer = self.post(path, members)
        assert answer.status == 200, (path, answer.status, answer.body[:500])
        return answer.json

    def session(self) -> str:
        """The id of a new session."""
        made = self.made("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")
        return made["session_id"]

    def model(self, session_id: str, number: int = 0) -> str:
        """The id of a new model, which is ready."""
        made = self.made(
            "create_model",
            session_id=session_id,
            model_seq_id=number,
            base_model=MODEL,
            lora_config={"rank": 4},
        )
        self.result(made["request_id"])
        return made["model_id"]

    def sampler(self, session_id: str, number: int = 0) -> str:
        """The id of a sampler of the base model."""
        made = self.made(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=number,
            base_model=MODEL,
        )
        return made["sampling_session_id"]

    def sample(self, sampler_id: str, seq_id: int, tokens: int = 1) -> Any:
        """The result of a sample of few tokens."""
        made = self.made(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=seq_id,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": tokens, "seed": 1},
            num_samples=1,
        )
        return self.result(made["request_id"])

    def finish(self, session_id: str) -> None:
        """End a session."""
        self.made(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)

    def result(self, request_id: str) -> Any:
        """What an operation ended with, whether that is a result or an error."""
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id})
            assert answer.status == 200, (answer.status, answer.body[:500])
            if answer.json.get("type") != "try_again":
                return answer.json


@dataclass
class Seen:
    """What the neighbour, the probes and the operator saw during an attack."""

    health_s: list[float] = field(default_factory=list[float])
    sample_s: list[float] = field(default_factory=list[float])
    peak_bytes: int = 0


class World:
    """A running server and its two tenants."""

    def __init__(self, server: Served, attacker: Tenant, neighbour: Tenant) -> None:
        self.server = server
        self.attacker = attacker
        self.neighbour = neighbour
        self.port = int(server.port)

    @property
    def log(self) -> str:
        """What the server has logged."""
        return self.server.log.read_text()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A bare connection, from another loopback address if one is named."""
        address = ("127.0.0.1", self.port)
        return socket.create_connection(address, PATIENCE_S, (source, 0))

    @contextmanager
    def watching(self) -> Generator[Seen]:
        """Probe the server from another process meanwhile, and measure its memory."""
        seen, pid = Seen(), self.server.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak so far
        probe = subprocess.Popen(
            [sys.executable, "-m", "tests.security.probe", str(self.port), self.neighbour.key],
            env=environment(self.server.log.parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with probe:
            assert probe.stdout is not None
            assert probe.stdout.readline() == "ready\n"
            try:
                yield seen
            finally:
                said, _ = probe.communicate("", START_S)
        assert probe.returncode == 0
        times = json.loads(said)
        seen.health_s, seen.sample_s = times["health"], times["sample"]
        seen.peak_bytes = _memory(pid, "VmHWM")

    def assert_well(self) -> None:
        """The server is the same process, ready, and works for the neighbour."""
        assert self.server.popen.poll() is None, self.log[-2000:]
        assert self.neighbour.get("/healthz").status == 200
        ready = self.neighbour.get("/readyz")
        assert ready.status == 200, ready.body
        session = self.neighbour.session()
        sampled = self.neighbour.sample(self.neighbour.sampler(session), 0)
        assert len(sampled["sequences"][0]["tokens"]) == 1, sampled
        self.neighbour.finish(session)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the lines that have these labels; 0.0 when there is none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.neighbour.get("/metrics").body.decode().splitlines()
            if line.startswith((f"{name} ", f"{name}{{")) and all(text in line for text in wanted)
        )


@contextmanager
def world_on(
    folder: Path,
    *flags: str,
    database: str | None = None,
    open_files: int | None = None,
    **env: str,
) -> Generator[World]:
    """A server in a folder that is ready, on SQLite or on a database."""
    data = folder / "data"
    place = () if database is None else ("--database", database)
    keys = {owner: _new_key(data, owner, *place) for owner in ("attacker", "neighbour")}
    with served(data, *place, *flags, auth=True, open_files=open_files, **env) as server:
        port = int(server.port)
        tenants = [Tenant(port, key, owner) for owner, key in keys.items()]
        yield World(server, *tenants)


def _new_key(data: Path, owner: str, *place: str) -> str:
    command = [sys.executable, "-m", "tinkex.cli", "key", "create", "--owner", owner]
    data.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, "--data-dir", str(data), *place],
        env=environment(data.parent),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _memory(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name} in the status of process {pid}")
