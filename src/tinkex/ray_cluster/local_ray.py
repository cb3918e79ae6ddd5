"""A Ray of one machine, for a cluster that was given no address.

`ray.init()` would end it with the command that called it, and `ray stop` would end every Ray of
this machine. So `ray start --block` runs in the background with a folder of its own, and a file in
that folder says which process it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinkex.clock import SystemClock
from tinkex.ray_cluster.connection import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_STARTS_S: Final = 120.0
_STOPS_S: Final = 20.0
_PAUSE_S: Final = 0.1
_RECORD: Final = "head.json"
_ADDRESS: Final = "ray_current_cluster"  # written by Ray
_LOG: Final = "start.log"
# The cores of one machine are shared by its operating system; a count would only refuse nodes.
_CPUS: Final = 256


class LocalRay:
    """The Ray that belongs to a cluster's name on this machine."""

    def __init__(self, cluster: str, place: Path | None = None) -> None:
        # Short: the paths of Ray's sockets have a limit of 107 bytes, and most of that is Ray's.
        digest = hashlib.sha256(cluster.encode()).hexdigest()[:8]
        self._home = place or Path(tempfile.gettempdir()) / f"tinkex-ray-{os.getuid()}"
        self.folder = self._home / digest
        self._clock = SystemClock()

    def address(self) -> str | None:
        """Where it runs, if it does."""
        record = self._record()
        if record is None or not _is_running(record["pid"], self.folder):
            return None
        return str(record["address"])

    def start(self, environment: Mapping[str, str]) -> str:
        """Start it, listening on loopback only; returns its address.

        `environment` must have no secrets: every process of Ray would inherit them.
        """
        self._home.mkdir(mode=0o700, exist_ok=True)
        if self._home.stat().st_uid != os.getuid():
            raise ClusterError(f"{self._home} belongs to another user", "Set TMPDIR.")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / _ADDRESS).unlink(missing_ok=True)
        with (self.folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                self._command(),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            address = self._await_address(process)
        except BaseException:
            self._end(process.pid)
            raise
        (self.folder / _RECORD).write_text(json.dumps({"pid": process.pid, "address": address}))
        return address

    def stop(self) -> bool:
        """End it with everything that runs on it; False if it does not run."""
        record = self._record()
        if record is None:
            return False
        found = _is_running(record["pid"], self.folder)
        self._end(record["pid"])
        (self.folder / _RECORD).unlink(missing_ok=True)
        return found

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", "--port=0", f"--temp-dir={self.folder}"),
            *("--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={_CPUS}"),
            f"--object-store-memory={80 << 20}",
        ]

    def _await_address(self, process: subprocess.Popen[bytes]) -> str:
        deadline = self._clock.now() + _STARTS_S
        while self._clock.now() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                if address := (self.folder / _ADDRESS).read_text().strip():
                    return address
            _pause()
        said = (self.folder / _LOG).read_text(errors="replace").strip().splitlines()[-5:]
        raise ClusterError(
            "Ray did not start on this machine: " + "\n".join(said or ["it said nothing"]),
            f"{self.folder / _LOG} has more.",
        )

    def _end(self, pid: int) -> None:
        """SIGTERM first, so that Ray ends its own processes; then whatever is left of it."""
        if _is_running(pid, self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = self._clock.now() + _STOPS_S
        while self._clock.now() < deadline and (left := processes(self.folder)):
            _reap(pid)
            if pid not in left:
                break
            _pause()
        for each in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        _reap(pid)

    def _record(self) -> Any:
        try:
            return json.loads((self.folder / _RECORD).read_text())
        except (OSError, ValueError):
            return None


def _is_running(pid: int, folder: Path) -> bool:
    """Whether this process is a Ray of that folder; numbers of processes are used again."""
    return os.fsencode(folder) in _command_line(pid)


def processes(folder: Path) -> list[int]:
    """The processes of a Ray whose files are in this folder."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _is_running(pid, folder)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _reap(pid: int) -> None:
    """Collect the exit status of a process that this one has started."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _pause() -> None:
    threading.Event().wait(_PAUSE_S)
