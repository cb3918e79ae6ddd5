"""Server processes for these tests: started, waited for by what they say, and always ended."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).parents[2]
MODEL = "tinkex/tiny"
KEY = "tml-of-a-test"
START_S = PATIENCE_S
_OURS = ("TINKER_", "TINKEX_", "CLOUDFLARE_")


def environment(home: Path, **more: str) -> dict[str, str]:
    """This checkout, an empty home, no settings, no hub."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    env.update(HOME=str(home), PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", HF_HUB_OFFLINE="1")
    return {**env, **more}


def serve_command(data_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tinkex.cli", "serve", "--data-dir", str(data_dir), *flags]


def refused(data_dir: Path, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status of a server that does not start, and what it said."""
    done = subprocess.run(
        serve_command(data_dir, *flags),
        env=environment(data_dir.parent, **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    return done.returncode, done.stdout


class Served:
    """A running `tinkex serve`."""

    def __init__(self, popen: subprocess.Popen[str], log: Path) -> None:
        self.popen = popen
        self.log = log
        self.url = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def wait_ready(self) -> None:
        """Read the line that says so."""
        line = read_line(self.popen, START_S)
        found = re.fullmatch(r"tinkex serves (\S.*) on (https?://\S+)\n", line)
        assert found is not None, f"{line!r}\n{self.log.read_text()}"
        self.url = found[2]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(START_S)


@contextmanager
def started(
    data_dir: Path, *flags: str, open_files: int | None = None, **env: str
) -> Generator[Served]:
    """A server process that may not be ready yet; killed at the end, if it still runs."""
    limited = () if open_files is None else ("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log = data_dir.parent / f"{data_dir.name}.log"
    with log.open("a") as errors:
        popen = subprocess.Popen(
            [*limited, *serve_command(data_dir, *flags)],
            env=environment(data_dir.parent, **env),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with popen:
        try:
            yield Served(popen, log)
        finally:
            popen.kill()


@contextmanager
def served(
    data_dir: Path,
    *flags: str,
    auth: bool = False,
    open_files: int | None = None,
    **env: str,
) -> Generator[Served]:
    """A server that is ready: the tiny model, any port, and one tenant unless keys are checked."""
    usual = ("--base-model", MODEL, "--threads", "1", "--port", "0")
    tenants = () if auth else ("--no-auth",)
    with started(data_dir, *usual, *tenants, *flags, open_files=open_files, **env) as server:
        server.wait_ready()
        yield server


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """A port for servers to listen on, one after another, that the system gives to nobody else.

    It is bound and never listened on, so a server that reuses addresses can have it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def read_line(popen: subprocess.Popen[Any], seconds: float) -> str:
    """A line of a program's output; fails when none comes in time.

    Nothing beyond the line is read: `select` does not see what lies in a buffer.
    """
    assert popen.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([popen.stdout], [], [], seconds)
        assert ready, f"nothing was said within {seconds} s after {line!r}"
        byte = os.read(popen.stdout.fileno(), 1)
        if not byte:
            break
        line += byte
    return line.decode()


def children(pid: int) -> list[int]:
    """The processes that a process has started, theirs included."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text()
        except OSError:  # just ended
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(path.parent.name))
    return found + [below for child in found for below in children(child)]


def wait_gone(pid: int, seconds: float = PATIENCE_S) -> None:
    """Return when a process has ended, whoever its parent is."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    assert ready, f"process {pid} is still there after {seconds} s"
