"""`tinkex cluster up` and `down` on a Ray that the command starts itself, on loopback only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.blocks import ROOT
from tests.patience import PATIENCE_S, until
from tests.ray.raylets import PASSWORD, ask, mentions

if TYPE_CHECKING:
    from collections.abc import Generator

pytest.importorskip("ray")
pytestmark = pytest.mark.exhaustive

DATABASE = f"postgresql://user:{PASSWORD}@127.0.0.1/db"
UP = ("up", "--name", "lab", "--artifacts", "file:///tmp", "--start-timeout", str(PATIENCE_S))


@pytest.fixture
def place() -> Generator[Path]:
    """A folder with a short path: Ray's sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="tx", dir="/tmp"))
    yield folder
    tinkex(folder, "down", "--name", "lab", "--force")
    assert until(lambda: not mentions(str(folder)))
    shutil.rmtree(folder)


def tinkex(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with fake nodes."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "RAY_"))}
    given = {
        "TMPDIR": str(place),
        "TINKEX_FAKE_EVENTS": str(place / "events"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.ray.cluster_command", "cluster", *words],
        env=kept | given,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_a_cluster_on_this_machine_grows_and_ends(place: Path):
    first = tinkex(
        place, *UP, "--database", DATABASE, "--cpu-nodes", "fake/model=1", "--format", "json"
    )
    assert first.returncode == 0, first.stderr
    said = json.loads(first.stdout)
    [node] = said["nodes"]
    assert ask(node["url"])["database"] == DATABASE
    assert "[1/1]" in first.stderr
    _no_secret(place, said["address"])
    assert (said["address"].partition(":")[0], node["machine"]) == ("127.0.0.1", "127.0.0.1")
    assert _listening(place) == {"127.0.0.1"}

    second = tinkex(place, *UP, f"--database={DATABASE}", "--cpu-nodes", "fake/model=2")
    assert second.returncode == 0, second.stderr
    assert node["url"] in second.stdout
    assert "starting Ray" not in second.stderr

    down = tinkex(place, "down", "--name", "lab")
    assert down.stdout == "Stopped 2 nodes of lab.\n", down.stderr
    assert (place / "events").read_text().count("drained") == 2
    again = tinkex(place, "down", "--name", "lab")
    assert again.returncode == 1
    assert "there is no cluster lab on this machine" in again.stderr


def test_a_failure_says_why_and_leaves_neither_nodes_nor_ray(place: Path):
    large = ("--cpu-nodes", "fake/model=1", "--cpus", "9999", "--placement-timeout", "1")
    done = tinkex(place, *UP, "--database", DATABASE, *large)
    assert done.returncode == 1
    assert "demanded: 1 x (9999 CPU)" in done.stderr
    assert "Ask for fewer nodes" in done.stderr
    assert PASSWORD not in done.stderr
    assert until(lambda: not mentions(str(place)))


def _no_secret(place: Path, address: str) -> None:
    """Neither in lists of processes, nor in Ray's list of programs, nor in its files."""
    assert mentions(str(place)), "the process list was not read"
    assert not mentions(PASSWORD)
    logs = [path for path in place.rglob("logs/**/*") if path.is_file()]
    assert logs
    assert not [path for path in logs if PASSWORD.encode() in path.read_bytes()]
    jobs = _jobs(address)
    assert any("tests.ray.cluster_command" in job for job in jobs), "the list was not read"
    assert not [job for job in jobs if PASSWORD in job]


def _listening(place: Path) -> set[str]:
    """The addresses that processes with this folder in their environment listen on."""
    inodes: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.fsencode(place) in _read(entry / "environ"):
            inodes |= {link[8:-1] for link in _links(entry) if link.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in _rows(Path("/proc/net") / name)]
    # The fourth column is the state; 0A is LISTEN.
    return {_address(row[1]) for row in rows if row[3] == "0A" and row[9] in inodes}


def _links(process: Path) -> list[str]:
    """What a process has open."""
    found: list[str] = []
    with suppress(OSError):  # it has just ended
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # just closed
                found.append(os.readlink(link))
    return found


def _rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _address(text: str) -> str:
    """An address as /proc/net writes it: words in the machine's byte order."""
    word = text.partition(":")[0]
    raw = b"".join(bytes.fromhex(word[at : at + 8])[::-1] for at in range(0, len(word), 8))
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw)
    name = socket.inet_ntop(socket.AF_INET6, raw)
    return name.removeprefix("::ffff:").replace("::1", "127.0.0.1")


def _jobs(address: str) -> list[str]:
    program = (
        "import json, ray; from ray._private import state\n"
        f"ray.init({address!r}, log_to_driver=False, logging_level='ERROR')\n"
        "jobs = state.state._connect_and_get_accessor().get_job_table()\n"
        "print(json.dumps([job.decode(errors='replace') for job in jobs]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Any = json.loads(done.stdout.splitlines()[-1])
    return found
