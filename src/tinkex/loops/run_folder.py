"""The folder of a run: what it is, how far it has come, and where its checkpoints are.

`run.json` says what the run is and how it stands; it is replaced whole. `checkpoints.jsonl` has a
line for each save, written after the steps up to it stand in `metrics.jsonl`, so that whatever
kills a run, its last checkpoint finds all of its past. The metrics themselves are written by
`tinkex.tracking`.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import InputError, StorageError
from tinkex.tracking.atomic_write import replacing
from tinkex.tracking.history import METRICS, keep_until, read_metrics
from tinkex.tracking.run_info import RUN

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

CHECKPOINTS = "checkpoints.jsonl"

Status = Literal["running", "interrupted", "failed", "finished"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A save after a step: `state_path` to train on from, `sampler_path` to sample from."""

    step: int
    state_path: str
    sampler_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `run.json` says."""

    kind: str
    model: str
    title: str
    settings: dict[str, Any]
    files: dict[str, dict[str, str]]
    """The files that the run reads, by what they are for: path and SHA-256."""
    rendered: str
    """The SHA-256 of the tokens they came to."""
    steps: int
    version: str
    began: float
    """When, in seconds since the epoch; a template that writes the date writes this one."""
    status: Status = "running"
    pid: int = 0
    host: str = ""
    """The machine whose process that is."""
    model_ids: list[str] = field(default_factory=list[str])
    """The training runs on the server: one for the beginning, one for each time it was resumed."""
    adapter_path: str | None = None
    """What to sample from, once the run is over."""
    chat: bool | None = None
    """Whether it is trained on messages, so that prompts need the chat template; None: unknown."""


class RunFolder:
    """One folder; holds nothing but its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record | None:
        """What the run is; None where there is none yet."""
        file = self.path / RUN
        try:
            return Record(**json.loads(file.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise InputError(f"is not what a run writes: {error}", str(file)) from error

    def write(self, record: Record) -> None:
        """Replace `run.json`, whole or not at all."""
        self._replace(self.path / RUN, json.dumps(asdict(record), indent=2) + "\n")

    def change(self, **changes: Any) -> Record:
        """Replace some of what `run.json` says."""
        record = self.read()
        if record is None:
            raise InputError(f"there is no {RUN} any more", str(self.path))
        record = replace(record, **changes)
        self.write(record)
        return record

    def make(self) -> None:
        """Make the folder; one that holds something else is refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            known = (self.path / RUN).exists() or not any(self.path.iterdir())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if not known:
            raise InputError("holds other things than a run; choose another folder", str(self.path))

    @property
    def begun(self) -> bool:
        """Whether it holds what a step has left."""
        metrics = self.path / METRICS
        return bool(self.checkpoints()) or (metrics.exists() and metrics.stat().st_size > 0)

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Keep other processes from training here; the system forgets with the process."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(folder)
            yield
        finally:
            os.close(folder)

    def _lock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another process is training in this folder; wait for it, or choose another",
                str(self.path),
            ) from None

    # -- checkpoints --------------------------------------------------------------------------

    def checkpoints(self) -> list[Checkpoint]:
        """Every save that was finished; a line that was cut off is none."""
        file = self.path / CHECKPOINTS
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        try:
            return [Checkpoint(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise InputError(f"is not what a run writes: {error}", str(file)) from error

    def add(self, checkpoint: Checkpoint) -> None:
        """Note a save; on disk when this returns."""
        self._write_checkpoints([*self.checkpoints(), checkpoint])

    def rewind(self, step: int) -> list[dict[str, float]]:
        """Forget what came after a step; returns the metrics that stay."""
        self._write_checkpoints(one for one in self.checkpoints() if one.step <= step)
        keep_until(self.path, step)
        return read_metrics(self.path)

    def _write_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        text = "".join(json.dumps(asdict(one)) + "\n" for one in checkpoints)
        self._replace(self.path / CHECKPOINTS, text)

    def _replace(self, file: Path, text: str) -> None:
        try:
            with replacing(file) as out:
                out.write(text.encode())
        except OSError as error:
            raise _unwritable(file, error) from error


def _unwritable(path: Path, error: OSError) -> StorageError:
    why = error.strerror or str(error)
    return StorageError(
        f"Cannot write {path}: {why}. Free some space or mend the folder.", str(path)
    )
