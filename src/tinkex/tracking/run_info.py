"""What a viewer needs from `run.json`: the run's title, its length and whether it still runs.

The training loop writes the file. Every field is optional here, so that any folder with a
`metrics.jsonl` can be viewed.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from pathlib import Path

RUN = "run.json"
_RUNNING = "running"

Ending = Literal["finished", "interrupted", "failed", "gone"]
"""How a run ended; "gone": its process ended without recording a status."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as its folder describes it; a missing field is None."""

    title: str
    steps: int | None = None
    status: str | None = None
    pid: int | None = None
    host: str | None = None

    def ended(self, last_step: int | None) -> Ending | None:
        """Why no more lines will come, as far as this machine knows; None: they may come."""
        if self.status == _RUNNING and self.pid is not None:
            # The processes of another machine are unknown here.
            elsewhere = self.host is not None and self.host != platform.node()
            return None if elsewhere or _is_alive(self.pid) else "gone"
        if self.status in ("interrupted", "failed"):
            return "interrupted" if self.status == "interrupted" else "failed"
        if self.status not in (None, _RUNNING):
            return "finished"
        enough = self.steps is not None and last_step is not None and last_step >= self.steps
        return "finished" if enough else None


def read_run(folder: Path) -> RunInfo:
    """The known fields; a missing or damaged file has none."""
    try:
        found: object = json.loads((folder / RUN).read_bytes())
    except (OSError, ValueError):
        found = None
    values = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    return RunInfo(
        title=_title(values) or folder.resolve().name,
        steps=_count(values.get("steps")),
        status=_word(values.get("status")),
        pid=_count(values.get("pid")),
        host=_word(values.get("host")),
    )


def _title(values: dict[str, object]) -> str:
    words = (
        [values.get("title")] if values.get("title") else [values.get("kind"), values.get("model")]
    )
    return " ".join(word for word in words if isinstance(word, str))


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or not a process id
        return True
    return True
