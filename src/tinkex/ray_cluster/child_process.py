"""The operating system's side of a node: start, readiness line, log lines, exit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.config import process_environment
from tinkex.ray_cluster.nodes import node_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.ray_cluster.nodes import NodeSpec
    from tinkex.ray_cluster.secrets import NodeSecrets

_KEPT_LINES: Final = 40
_LINE_BYTES: Final = 4096
_CHUNK_BYTES: Final = 65536
_LAUNCH: Final = "tinkex.ray_cluster.launch"


class ChildProcess:
    """A running node. `ready` is set once it has said where it listens."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        secrets: NodeSecrets,
        log: Callable[[str], None],
    ) -> None:
        self.pid = process.pid
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._folder = folder
        self._secrets = secrets
        self._log = log
        # Mutable state: the last lines of its output.
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its output, without secrets."""
        return tuple(self._lines)

    async def wait(self) -> int:
        """Read its output until it exits; returns the exit status."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        async with asyncio.TaskGroup() as group:
            readers = [
                group.create_task(_read_lines(self._process.stdout, self._take_output)),
                group.create_task(_read_lines(self._process.stderr, self._take_log)),
            ]
            status = await self._process.wait()
            # A process that the node started may keep its output open: end it, too.
            self.kill()
            await asyncio.wait(readers, timeout=1.0)
            for reader in readers:
                reader.cancel()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        return status

    def terminate(self) -> None:
        """Ask it to drain and to exit."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

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
    order = {"command": command, "environment": secrets.environment(process_environment())}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _LAUNCH,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # its own group, so that `kill` reaches what it starts
    )
    assert process.stdin is not None
    child = ChildProcess(process, folder, secrets, log)
    try:
        process.stdin.write(json.dumps(order).encode())
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has exited, which `wait` reports
    process.stdin.close()
    return child


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


async def _read_lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Call `take` with each line; a longer one is cut into pieces."""
    rest = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            take(line[:_LINE_BYTES].decode(errors="replace").rstrip("\r"))
        if len(rest) > _LINE_BYTES:
            take(rest[:_LINE_BYTES].decode(errors="replace"))
            rest = b""
    if rest:
        take(rest.decode(errors="replace"))
