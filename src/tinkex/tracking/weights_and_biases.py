"""A run's numbers at Weights & Biases; offline where `WANDB_MODE=offline` says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEFAULT_PROJECT = "tinkex"
_ID = "wandb.id"


class WandbSink:
    """A run over there; resuming the run here goes on with the same one."""

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
        known = folder / _ID
        try:
            self._run: Any = package.init(
                project=project or DEFAULT_PROJECT,
                name=run_name,
                id=known.read_text().strip() if known.exists() else None,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                # Our own view shows what happens, and what a run prints is not for upload.
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
