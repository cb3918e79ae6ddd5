"""A run's numbers as TensorBoard reads them, in `tensorboard/` of the run's folder."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tinkex.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Written by a thread of the package's own, so that is what a killed run loses of its points.
_FLUSH_S = 1


class TensorBoardSink:
    """Writes event files; TensorBoard itself is needed only to look at them."""

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
        # Mutable: opened at the first step, because a resumed run must say where it goes on.
        self._writer: Any = None
        self.place = f"TensorBoard: tensorboard --logdir {self._folder}"

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in values.items():
            if math.isfinite(value):  # the writer would complain about each of the others
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        writer: Any = self._package.SummaryWriter(
            logdir=str(self._folder),
            # What an interrupted run wrote from this step on is hidden: it is written again.
            purge_step=step if self._folder.exists() else None,
            # Otherwise two files begun in the same second would be one.
            filename_suffix=f".{step}",
            flush_secs=_FLUSH_S,
        )
        text = json.dumps(self._settings, indent=2, default=str)
        writer.add_text("settings", f"```json\n{text}\n```", step)
        return writer
