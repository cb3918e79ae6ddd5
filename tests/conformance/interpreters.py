"""Where the other interpreters are, and how to run a program of ours in one of them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[2]
# Nothing listens there.
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Interpreters:
    """The environments made by `make_venvs.py`, and the cookbook's source."""

    root: Path

    def version(self, name: str) -> Path:
        """The interpreter of one environment."""
        return self.root / name / "bin" / "python"

    @property
    def official(self) -> Path:
        return self.version("official")

    @property
    def cookbook(self) -> Path:
        return self.version("cookbook")

    @property
    def cookbook_source(self) -> Path:
        return self.root / "cookbook-source"

    def start(
        self,
        python: Path,
        arguments: Sequence[str],
        *,
        home: Path,
        cwd: Path | None = None,
        base_url: str = NOWHERE,
    ) -> subprocess.Popen[str]:
        """Start a program with tinkex on its path and nothing else of ours around it."""
        environment = {
            "PATH": os.defpath,
            "HOME": str(home),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "HF_HUB_OFFLINE": "1",
            # A key must look like one.
            "TINKER_API_KEY": "tml-conformance",
            "TINKER_BASE_URL": base_url,
            "TINKER_TELEMETRY": "0",
        }
        return subprocess.Popen(
            [str(python), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment,
        )


def finish(program: subprocess.Popen[str], timeout_s: float = 240) -> str:
    """What a program printed; its complaints when it failed."""
    try:
        out, complaints = program.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        program.kill()
        out, complaints = program.communicate()
    assert program.returncode == 0, complaints[-4000:]
    return out
