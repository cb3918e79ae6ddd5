"""Where a run's numbers go: always to `metrics.jsonl`, and to TensorBoard or W&B if asked.

The file is the run's own record, so failing to write it is an error. The others are for looking:
one that fails while the run is on is warned about once and left out from then on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from tinkex.errors import InputError, StorageError
from tinkex.tracking.history import METRICS, drop_torn_line, write_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

CHOICES = "jsonl, tensorboard, wandb or wandb:PROJECT"


class Sink(Protocol):
    """Takes the numbers of each step, in order."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep one step's numbers."""
        ...

    def close(self) -> None:
        """Let go; what was recorded stays."""
        ...


class Viewer(Sink, Protocol):
    """A sink outside the run's own record; `place` says where to look."""

    place: str


def open_sinks(
    names: Sequence[str], folder: Path, run_name: str, settings: Mapping[str, object]
) -> Sinks:
    """A sink for all of `names`, and for `metrics.jsonl` in any case, which is appended to.

    Raises InputError for an unknown name, MissingPackageError where a package is missing and
    StorageError where the folder cannot be written, all before anything is recorded.
    """
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        _check(name)
    viewers: list[Viewer] = []
    try:
        for name in wanted:
            viewers += _viewer(name, folder, run_name, settings)
        return Sinks(JsonlSink(folder), viewers)
    except BaseException:
        for viewer in viewers:
            viewer.close()
        raise


def _check(name: str) -> None:
    kind, colon, project = name.partition(":")
    fits = not colon or (kind == "wandb" and project.strip())
    if kind not in ("jsonl", "tensorboard", "wandb") or not fits:
        raise InputError(f"results cannot go to {name!r}; choose {CHOICES}")


def _viewer(name: str, folder: Path, run_name: str, settings: Mapping[str, object]) -> list[Viewer]:
    kind, _, project = name.partition(":")
    if kind == "tensorboard":
        from tinkex.tracking.tensorboard import TensorBoardSink

        return [TensorBoardSink(folder, settings)]
    if kind == "wandb":
        from tinkex.tracking.weights_and_biases import WandbSink

        return [WandbSink(folder, run_name, settings, project or None)]
    return []


class Sinks:
    """The run's own record, and those who watch."""

    def __init__(self, own: Sink, viewers: Sequence[Viewer]) -> None:
        self._own = own
        # Mutable: a viewer that failed is left out.
        self._viewers = list(viewers)

    @property
    def places(self) -> list[str]:
        """A sentence about each viewer: where to look."""
        return [viewer.place for viewer in self._viewers]

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep one step's numbers everywhere."""
        self._own.record(step, values)
        for viewer in list(self._viewers):
            try:
                viewer.record(step, values)
            except Exception as error:  # noqa: BLE001 - somebody else's package must not end a run
                self._viewers.remove(viewer)
                logger.warning("No more results go to this place: %s (%s)", viewer.place, error)

    def close(self) -> None:
        """Finish all of them."""
        for viewer in self._viewers:
            try:
                viewer.close()
            except Exception as error:  # noqa: BLE001 - the run is over and kept
                logger.warning("Could not finish: %s (%s)", viewer.place, error)
        self._own.close()


class JsonlSink:
    """One line per step in `metrics.jsonl`, there as soon as `record` returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._failed(error) from error

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        try:
            self._file.write(write_line(step, values).encode())
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        what = error.strerror or str(error)
        return StorageError(
            f"Cannot write {self._path}: {what}. Free some space or mend the folder, then resume.",
            str(self._path),
        )
