"""The model that a command samples: a base model, a checkpoint, or the result of a run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.adapters.peft_layout import CONFIG_FILE
from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.connect import load_config, service_client
from tinkex.config import DEFAULT_MODEL
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from collections.abc import Generator

    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient

_SCHEME = "tinker://"
_SHOWN_MODELS = 5


@dataclass(frozen=True, slots=True)
class SamplingTarget:
    """A base model, or a checkpoint of one.

    `source` is the base model that an embedded server must load, `label` the user's name for it.
    """

    base_model: str | None = None
    model_path: str | None = None
    source: str | None = None
    label: str = ""

    @property
    def model(self) -> str:
        """Its name in a request."""
        return self.model_path or self.base_model or ""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.label or self.model

    def open(self, service: ServiceClient) -> SamplingClient:
        """A sampling client for it."""
        if self.model_path is not None:
            return service.create_sampling_client(model_path=self.model_path)
        return service.create_sampling_client(base_model=self.base_model)


@contextmanager
def connected(target: SamplingTarget | None) -> Generator[tuple[ServiceClient, SamplingTarget]]:
    """A client, and the target; without one, the only model of the server."""
    if target is None and load_config().embedded:
        target = SamplingTarget(base_model=DEFAULT_MODEL)
    with service_client(None if target is None else target.source) as service:
        yield service, target or only_model(service)


def find(text: str) -> SamplingTarget:
    """The target of a word on the command line: a path, a run's folder, or a model's name."""
    if text.startswith(_SCHEME):
        return SamplingTarget(model_path=text)
    folder = Path(text)
    if (folder / "run.json").is_file():
        return of_run(folder)
    if folder.is_dir():
        raise CommandError(
            f"{text} is a folder, but not of a training run: it has no run.json",
            "Name a base model, a tinker:// path, or a folder that `tinkex train` has made.\n"
            "A model's own folder has to be served under a name: NAME=FOLDER.",
        )
    if text.startswith((".", "/", "~")):
        raise CommandError(f"There is no folder {text}", "`ls runs` may show what there is.")
    return SamplingTarget(base_model=text.partition("=")[0], source=text)


def checkpoint_named(text: str) -> SamplingTarget:
    """A checkpoint by its path, or a run's checkpoint by the run's folder.

    Of a run it is the training checkpoint, which every server lets users download.
    """
    folder = Path(text)
    if (folder / "run.json").is_file():
        return of_run(folder, training=True)
    if (folder / CONFIG_FILE).is_file():
        raise CommandError(
            f"{text} is an exported adapter in PEFT's layout already",
            "Give the checkpoint it was made from: tinker://RUN/weights/NAME, or its run's folder.",
        )
    if not text.startswith(_SCHEME):
        what = "a folder, but not" if folder.is_dir() else "neither a checkpoint nor the folder"
        raise misuse(
            f"{text} is {what} of a training run",
            "Give tinker://RUN/weights/NAME, or a folder that `tinkex train` has made.",
        )
    ParsedCheckpointTinkerPath.from_tinker_path(text)
    return SamplingTarget(model_path=text)


def of_run(folder: Path, *, training: bool = False) -> SamplingTarget:
    """The best weights of a finished training run, else the newest weights."""
    from tinkex.loops.run_folder import RunFolder

    run = RunFolder(folder)
    record, saved = run.read(), run.checkpoints()
    path = (record and record.adapter_path) or (saved[-1].sampler_path if saved else None)
    if training:
        path = next((one.state_path for one in saved if one.sampler_path == path), None)
    if record is None or path is None:
        raise CommandError(
            f"The run in {folder} has no checkpoint yet",
            f"`tinkex run watch {folder}` shows its progress.",
        )
    base_model = record.model.partition("=")[0]
    return SamplingTarget(base_model, path, source=record.model, label=str(folder))


def only_model(service: ServiceClient) -> SamplingTarget:
    """The only model of the server; raises a `CommandError` when there are several."""
    offered = service.get_server_capabilities().supported_models
    names = [model.model_name for model in offered if model.model_name and model.sampleable]
    if len(names) == 1:
        return SamplingTarget(base_model=names[0])
    if not names:
        raise CommandError("This server has no model to sample from", "Name a tinker:// path.")
    shown = "\n".join(names[:_SHOWN_MODELS])
    raise misuse(
        "This server has several models: name one",
        f"{shown}\n`tinkex model list` shows all of them.",
    )
