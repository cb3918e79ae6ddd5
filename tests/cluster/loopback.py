"""The machines of `docs/how-to/cluster.md` on loopback: its files and commands, nearly as written.

10.0.0.11 is 127.0.0.11, folders of a machine are below one of the test, and `sudo`, `psql` and
`systemctl` are stand-ins. Everything else runs as the page has it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.serving import environment
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping

UNIT = "/etc/systemd/system/tinkex.service"


@dataclass
class Machine:
    """One machine: its files, the shell of its operator, and the service that runs there."""

    address: str
    root: Path
    words: Mapping[str, str]
    """What is written differently here, in this order."""
    path: str
    # Mutable state: lines that later commands of the same shell depend on, and the service.
    shell: list[str] = field(default_factory=list)
    service: subprocess.Popen[bytes] | None = None

    def here(self, text: str) -> str:
        """A text of the page as it is on this machine."""
        folders = {f"{name}/": f"{self.root}{name}/" for name in ("/etc", "/var/lib")}
        for word, other in {**self.words, **folders}.items():
            text = text.replace(word, other)
        return text

    def write(self, place: str, text: str) -> None:
        """Write one of the page's files."""
        file = Path(f"{self.root}{place}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.here(text) + "\n")

    def run(self, block: str) -> str:
        """Run the commands of a block; the output of those that are not the service's."""
        printed = ""
        for line in block.splitlines():
            if line.startswith("sudo systemctl "):
                self._systemctl(shlex.split(line)[2:])
            elif line.startswith(("set -a;", "export ")):
                self.shell.append(line)
            elif not line.startswith("#"):
                printed += self._bash(line)
        return printed

    def _bash(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", self.here("\n".join([*self.shell, line]))],
            env=environment(self.root, PATH=self.path, COLUMNS="200"),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{self.address}: {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _systemctl(self, words: list[str]) -> None:
        verb, unit = words[0], words[-1]
        assert unit == "tinkex"
        if verb in ("enable", "start"):
            self._start()
        else:
            assert verb in ("disable", "stop"), verb
            assert self.stop() == 0, self.log

    def _start(self) -> None:
        assert self.service is None
        lines = Path(f"{self.root}{UNIT}").read_text().splitlines()
        pairs = [line.split("=", 1) for line in lines if "=" in line]
        files = [Path(value) for name, value in pairs if name == "EnvironmentFile"]
        (command,) = [value for name, value in pairs if name == "ExecStart"]
        settings = [
            line.split("=", 1)
            for file in files
            for line in file.read_text().splitlines()
            if line and not line.startswith("#")
        ]
        with (self.root / "log").open("ab") as log:
            self.service = subprocess.Popen(
                shlex.split(command),
                env=environment(self.root, PATH=self.path, **dict(settings)),
                cwd=self.root,
                stdout=log,
                stderr=log,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the service; its exit status."""
        service, self.service = self.service, None
        if service is None:
            return 0
        service.send_signal(number)
        return service.wait(PATIENCE_S)

    @property
    def log(self) -> str:
        """What the service has logged."""
        return (self.root / "log").read_text()


def stand_ins(folder: Path, psql: str) -> str:
    """A PATH with `tinkex` of this checkout, and with what a bare machine would have."""
    folder.mkdir()
    scripts = {
        "tinkex": f'exec {sys.executable} -m tinkex.cli "$@"',
        "sudo": 'test "$1" = -u && shift 2\nexec "$@"',
        "psql": f'exec {psql} "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
