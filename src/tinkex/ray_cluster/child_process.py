"""The operating system's side of a node: start, readiness line, log lines, exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import anyio.lowlevel

from tinkex.config import node_environment, process_environment
from tinkex.ray_cluster.nodes import node_arguments
from tinkex.ray_cluster.secrets import NodeSecrets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.ray_cluster.nodes import NodeSpec

_KEPT_LINES: Final = 40
_LINE_BYTES: Final = 4096
_OUTPUT_S: Final = 5.0
_LAUNCH: Final = "tinkex.ray_cluster.launch"


class ChildProcess:
    """A running node. `ready` is set once it has said where it listens.

    Threads make the blocking calls, because asyncio's own processes end only when their output is
    closed, and a process that the node started may keep it open.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        folder: Path,
        secrets: NodeSecrets,
        log: Callable[[str], None],
    ) -> None:
        self.pid = popen.pid
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str] = self._loop.create_future()
        self._popen = popen
        self._folder = folder
        self._secrets = secrets
        self._log = log
        # Mutable state: the last lines of its output.
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readers = [
            threading.Thread(target=self._read, args=pair, name="tinkex-output", daemon=True)
            for pair in ((popen.stdout, self._take_output), (popen.stderr, self._take_log))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its output, without secrets."""
        return tuple(self._lines)

    def send(self, data: bytes) -> None:
        """Write to its standard input and close it; an exit is reported by `wait`."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:
            stdin.write(data)

    async def wait(self) -> int:
        """Wait until it has exited and its output is read; returns the exit status."""
        status = await asyncio.to_thread(self._popen.wait)
        self.kill()  # the processes that it started
        await asyncio.to_thread(self._clean_up)
        await anyio.lowlevel.checkpoint()  # lines that the readers have handed over
        return status

    def _clean_up(self) -> None:
        for reader in self._readers:
            reader.join(_OUTPUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, stream: IO[bytes], take: Callable[[str], None]) -> None:
        """Hand each line to the loop; a long one in pieces."""
        with stream:
            while line := stream.readline(_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n")
                self._loop.call_soon_threadsafe(take, text)

    def terminate(self) -> None:
        """Ask it to drain and to exit."""
        self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and the processes that it started; one that has exited is fine."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _take_output(self, line: str) -> None:
        url = _ready_url(line)
        if url is not None and not self.ready.done():
            self.ready.set_result(url)
        self._take_log(line)

    def _take_log(self, line: str) -> None:
        shown = self._secrets.hide(line)
        self._lines.append(shown)
        self._log(shown)


async def start_child(
    spec: NodeSpec, secrets: NodeSecrets, host: str, log: Callable[[str], None]
) -> ChildProcess:
    """Start the node; it dies with the thread that calls this."""
    folder = await asyncio.to_thread(_new_folder, spec)
    program = spec.program or (sys.executable, "-m", "tinkex.cli", "serve")
    command = [*program, *node_arguments(spec, host=host, data_dir=str(folder))]
    environment = secrets.environment(process_environment())
    order = {"command": command, "environment": environment}
    # Secrets may also be set on the machine.
    child = ChildProcess(_launch(), folder, NodeSecrets(node_environment(environment)), log)
    await asyncio.to_thread(child.send, json.dumps(order).encode())
    return child


def _launch() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _LAUNCH, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # its own group, so that `kill` reaches what it starts
    )


def _new_folder(spec: NodeSpec) -> Path:
    """A folder for this run, after removing those of actors of this node that were killed."""
    prefix = f"tinkex-{spec.cluster}-{spec.name}."
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition(".")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}."))


def _ready_url(line: str) -> str | None:
    """The address in the line `{"url": …}` that `tinkex serve --format json` prints."""
    if not line.startswith("{"):
        return None
    try:
        said: Any = json.loads(line)
    except ValueError:
        return None
    url = cast("dict[str, Any]", said).get("url") if isinstance(said, dict) else None
    return url if isinstance(url, str) else None
