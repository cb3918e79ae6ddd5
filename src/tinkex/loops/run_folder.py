"""The folder of a run: what it is, how far it has come, and where its checkpoints are.

`run.json` holds the run's settings and status; it is replaced atomically. `checkpoints.jsonl` has a
line for each save, written after `metrics.jsonl` has the steps up to it, so that a killed run still
has the metrics of every step before its last checkpoint. `tinkex.tracking` writes the metrics.

`record_of` and the functions after it decide whether a run can be resumed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import InputError, StorageError
from tinkex.new_files import replacing
from tinkex.tracking.history import METRICS, keep_until, read_metrics
from tinkex.tracking.run_info import RUN

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping
    from pathlib import Path

    from tinkex.loops.run_settings import Settings

CHECKPOINTS = "checkpoints.jsonl"

Status = Literal["running", "interrupted", "failed", "finished"]


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A save after a step: `state_path` to resume from, `sampler_path` to sample from."""

    step: int
    state_path: str
    sampler_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contents of `run.json`."""

    kind: str
    model: str
    title: str
    settings: dict[str, Any]
    files: dict[str, dict[str, str]]
    """The files that the run reads, by what they are for: path and SHA-256."""
    rendered: str
    """The SHA-256 of the tokens of these files."""
    steps: int
    version: str
    began: float
    """In seconds since the epoch; a template that writes the date writes this one."""
    status: Status = "running"
    pid: int = 0
    host: str = ""
    """The machine of that process."""
    model_ids: list[str] = field(default_factory=list[str])
    """The training runs on the server: the first one, then one for each time it was resumed."""
    adapter_path: str | None = None
    """The checkpoint to sample from, once the run has finished."""
    chat: bool | None = None
    """Whether it is trained on messages, so that prompts need the chat template; None: unknown."""


class RunFolder:
    """One folder; holds only its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record | None:
        """The record of the run; None where there is none yet."""
        file = self.path / RUN
        try:
            return Record(**json.loads(file.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise InputError(f"is not what a run writes: {error}", str(file)) from error

    def write(self, record: Record) -> None:
        """Replace `run.json` atomically."""
        self._replace(self.path / RUN, json.dumps(asdict(record), indent=2) + "\n")

    def change(self, **changes: Any) -> Record:
        """Replace some fields of `run.json`."""
        record = self.read()
        if record is None:
            raise InputError(f"there is no {RUN} any more", str(self.path))
        record = replace(record, **changes)
        self.write(record)
        return record

    def make(self) -> None:
        """Make the folder; raises InputError for one that holds other files."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            known = (self.path / RUN).exists() or not any(self.path.iterdir())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if not known:
            raise InputError("holds other things than a run; choose another folder", str(self.path))

    @property
    def started(self) -> bool:
        """Whether it holds checkpoints or metrics."""
        metrics = self.path / METRICS
        return bool(self.checkpoints()) or (metrics.exists() and metrics.stat().st_size > 0)

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Lock the folder against other processes; the lock ends with this process."""
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

    def checkpoints(self) -> list[RunCheckpoint]:
        """Every completed save; a truncated last line is ignored."""
        file = self.path / CHECKPOINTS
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        try:
            return [RunCheckpoint(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise InputError(f"is not what a run writes: {error}", str(file)) from error

    def add(self, checkpoint: RunCheckpoint) -> None:
        """Add a save; it is on disk when this returns."""
        self._write_checkpoints([*self.checkpoints(), checkpoint])

    def rewind(self, step: int) -> list[dict[str, float]]:
        """Drop everything after a step; returns the metrics that remain."""
        self._write_checkpoints(one for one in self.checkpoints() if one.step <= step)
        keep_until(self.path, step)
        return read_metrics(self.path)

    def _write_checkpoints(self, checkpoints: Iterable[RunCheckpoint]) -> None:
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
        f"Cannot write {path}: {why}. Free some space or fix the folder.", str(path)
    )


# -- resuming ----------------------------------------------------------------------------------


def record_of(folder: RunFolder, *, resume: bool) -> Record | None:
    """The record to resume; None for a new run. Raises InputError when `resume` does not fit.

    A run without a step may be started again.
    """
    record = folder.read()
    if resume and record is None:
        raise InputError("there is no run to resume", str(folder.path))
    if not resume and folder.started:
        raise InputError(
            "this folder has a run already; resume it, or choose another folder", str(folder.path)
        )
    return record if resume else None


def hashes(files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Path and SHA-256 of each file, by what it is for."""
    return {
        name: {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    }


def refuse_other_run(record: Record, settings: Settings, files: Mapping[str, Path]) -> None:
    """Raise InputError naming every setting and file that has changed since the run began."""
    changed: list[str] = []
    if record.kind != settings.kind:
        changed.append(f"it is a run of `train {record.kind}`, not of `train {settings.kind}`")
    now = asdict(settings)
    for name in record.settings.keys() & now.keys() - settings.free:
        if record.settings[name] != now[name]:
            changed.append(f"{name} was {record.settings[name]}, and is {now[name]} now")
    changed += _changed_files(record, files)
    refuse(sorted(changed))


def refuse_other_tokens(record: Record, rendered: str) -> None:
    """Raise InputError when the same files now give other tokens."""
    if record.rendered != rendered:
        refuse(["the same data has other tokens now: the model's tokenizer or template differs"])


def refuse(changed: list[str]) -> None:
    """Raise InputError listing the changes, if there are any."""
    if changed:
        lines = "\n".join(f"  {one}" for one in changed)
        raise InputError(
            f"this is not the run in the folder:\n{lines}\n"
            "Resume it with its own settings and data, or start another run in a new folder.",
        )


def _changed_files(record: Record, files: Mapping[str, Path]) -> list[str]:
    now = hashes(files)
    changed: list[str] = []
    for name in sorted(record.files.keys() | now.keys()):
        was, found = record.files.get(name), now.get(name)
        if was is None or found is None:
            changed.append(
                f"it was started {'with' if found is None else 'without'} a file: {name}"
            )
        elif was["sha256"] != found["sha256"]:
            changed.append(f"the contents of {found['path']} have changed")
    return changed
