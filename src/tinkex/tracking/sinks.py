"""Where a run's metrics go: always to `metrics.jsonl`, and to TensorBoard or W&B if asked.

The file is the run's own record, so failing to write it is an error. The others are viewers: one
that fails during the run is logged once and not used again.
"""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, Protocol

from tinkex.errors import InputError, MissingPackageError, StorageError
from tinkex.tracking.history import METRICS, drop_torn_line, write_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

CHOICES = "jsonl, tensorboard, wandb or wandb:PROJECT"
DEFAULT_PROJECT = "tinkex"
_WANDB_ID = "wandb.id"
# tensorboardX writes in its own thread; a killed run loses at most the points of this time.
_FLUSH_S = 1


class Sink(Protocol):
    """Takes the metrics of each step, in order."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Close the sink; recorded metrics stay."""
        ...


class Viewer(Sink, Protocol):
    """A sink for viewing; `place` is where to look."""

    place: str


def open_sinks(
    names: Sequence[str], folder: Path, run_name: str, settings: Mapping[str, object]
) -> Sinks:
    """A sink that records to `names` and always appends to `metrics.jsonl`.

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
        return [TensorBoardSink(folder, settings)]
    if kind == "wandb":
        return [WandbSink(folder, run_name, settings, project or None)]
    return []


class Sinks:
    """The run's own record, and the viewers."""

    def __init__(self, own: Sink, viewers: Sequence[Viewer]) -> None:
        self._own = own
        # Mutable: a failed viewer is removed.
        self._viewers = list(viewers)

    @property
    def places(self) -> list[str]:
        """A sentence about each viewer: where to look."""
        return [viewer.place for viewer in self._viewers]

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step everywhere."""
        self._own.record(step, values)
        for viewer in list(self._viewers):
            try:
                viewer.record(step, values)
            except Exception as error:  # noqa: BLE001 - a viewer's package must not end a run
                self._viewers.remove(viewer)
                logger.warning("No more results go to this place: %s (%s)", viewer.place, error)

    def close(self) -> None:
        """Close all of them."""
        for viewer in self._viewers:
            try:
                viewer.close()
            except Exception as error:  # noqa: BLE001 - the run has ended and is recorded
                logger.warning("Could not finish: %s (%s)", viewer.place, error)
        self._own.close()


class JsonlSink:
    """One line per step in `metrics.jsonl`, written when `record` returns."""

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
            f"Cannot write {self._path}: {what}. Free some space or fix the folder, then resume.",
            str(self._path),
        )


class TensorBoardSink:
    """Writes event files in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise MissingPackageError(
                "TensorBoard files need tensorboardX", "'tinkex[tensorboard]'"
            ) from error
        self._package: Any = tensorboardX
        self._folder = folder / "tensorboard"
        self._settings = settings
        # Mutable: opened at the first step, which a resumed run has to pass to the writer.
        self._writer: Any = None
        self.place = f"TensorBoard: tensorboard --logdir {self._folder}"

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in values.items():
            if math.isfinite(value):  # the writer would warn about other values
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        writer: Any = self._package.SummaryWriter(
            logdir=str(self._folder),
            # Hides the points that an interrupted run has written from this step on.
            purge_step=step if self._folder.exists() else None,
            # Otherwise two files created in the same second would have the same name.
            filename_suffix=f".{step}",
            flush_secs=_FLUSH_S,
        )
        text = json.dumps(self._settings, indent=2, default=str)
        writer.add_text("settings", f"```json\n{text}\n```", step)
        return writer


class WandbSink:
    """A run at Weights & Biases; a resumed run continues it. Offline with `WANDB_MODE=offline`."""

    def __init__(
        self,
        folder: Path,
        run_name: str,
        settings: Mapping[str, object],
        project: str | None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError("Weights & Biases needs wandb", "'tinkex[wandb]'") from error
        package: Any = wandb
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / _WANDB_ID
        try:
            self._run: Any = package.init(
                project=project or DEFAULT_PROJECT,
                name=run_name,
                id=known.read_text().strip() if known.exists() else None,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                # The run has its own view, and its output is not for upload.
                settings=package.Settings(console="off", silent=True),
            )
        except package.Error as error:
            raise InputError(
                f"Weights & Biases cannot be used: {str(error).rstrip('.')}. Sign in with "
                "`wandb login`, or set WANDB_MODE=offline and send the run later with `wandb sync`."
            ) from error
        known.write_text(f"{self._run.id}\n")
        where = f"offline, in {self._run.dir}" if self._run.offline else self._run.url
        self.place = f"Weights & Biases: {where}"

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is sent, or on disk."""
        self._run.finish()
