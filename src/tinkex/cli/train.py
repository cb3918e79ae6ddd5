"""`tinkex train`: ready-made loops, each in a run folder of its own."""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.cli.connect import service_client
from tinkex.cli.export import export_adapter
from tinkex.cli.failures import misuse
from tinkex.cli.main import INTERRUPTED
from tinkex.cli.output import say, show_one
from tinkex.errors import InputError, MissingPackageError
from tinkex.loops.dpo import DpoJob
from tinkex.loops.rl import RlJob
from tinkex.loops.run_folder import RunFolder
from tinkex.loops.runner import ended, run
from tinkex.loops.settings import DpoSettings, RlSettings, Settings, SftSettings
from tinkex.loops.sft import SftJob
from tinkex.tracking.figure import write_picture
from tinkex.tracking.history import read_metrics
from tinkex.tracking.series import series_of
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from tinkex.clients.service import ServiceClient
    from tinkex.loops.loop import Outcome
    from tinkex.loops.runner import Job

S = TypeVar("S", bound=Settings)

ADAPTER = "adapter"
_PICTURES = ("curve.svg", "curve.png")


def sft(args: argparse.Namespace) -> int | None:
    """Supervised fine-tuning on a file of examples."""
    with _named_as_options():
        place = _place(args, Path(args.data), "sft")
        settings = _settings(args, place, SftSettings)
        return _train(args, place, SftJob(settings, Path(args.data), _eval_file(args, place)))


def dpo(args: argparse.Namespace) -> int | None:
    """Preference optimization on a file of pairs."""
    with _named_as_options():
        place = _place(args, Path(args.data), "dpo")
        settings = _settings(args, place, DpoSettings)
        return _train(args, place, DpoJob(settings, Path(args.data), _eval_file(args, place)))


def rl(args: argparse.Namespace) -> int | None:
    """Reinforcement learning on a task."""
    with _named_as_options():
        place = _place(args, Path(args.task), "rl")
        return _train(args, place, RlJob(_settings(args, place, RlSettings), Path(args.task)))


# -- what was asked for ------------------------------------------------------------------------


def _place(args: argparse.Namespace, source: Path, kind: str) -> RunFolder:
    """The run's folder; refused where a run was begun that is not to be resumed, or is not."""
    place = RunFolder(Path(args.output or Path("runs") / f"{source.stem}-{kind}"))
    if args.resume and place.read() is None:
        raise misuse(
            f"There is no run to resume in {place.path}",
            "Leave --resume out to begin one, or name its folder with --output.",
        )
    if not args.resume and place.begun:
        raise misuse(
            f"{place.path} already holds a run",
            f"Resume it:  {_resume_command(kind, source, place)}\n"
            "Or start another run in a folder of its own, with --output DIR.",
        )
    return place


def _settings(args: argparse.Namespace, place: RunFolder, kind: type[S]) -> S:
    """What was given; for the rest, what the run was begun with, or the defaults."""
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    record = place.read() if args.resume else None
    known: dict[str, Any] = {} if record is None else record.settings
    return kind(**({name: known[name] for name in names & known.keys()} | given))


@contextmanager
def _named_as_options() -> Generator[None]:
    """A setting's error comes out under the name that it has on the command line."""
    try:
        yield
    except InputError as error:
        if not error.path.isidentifier():
            raise
        raise misuse(f"--{error.path.replace('_', '-')} {error.reason}") from error


def _eval_file(args: argparse.Namespace, place: RunFolder) -> Path | None:
    if args.eval is not None:
        return Path(args.eval)
    record = place.read() if args.resume else None
    known = {} if record is None else record.files.get("eval", {})
    return Path(known["path"]) if known else None


def _resume_command(kind: str, source: Path, place: RunFolder) -> str:
    words = ["tinkex", "train", kind, str(source), "--output", str(place.path), "--resume"]
    return shlex.join(words)


# -- doing it ----------------------------------------------------------------------------------


def _train(args: argparse.Namespace, place: RunFolder, job: Job) -> int | None:
    adapter = place.path / ADAPTER
    outcome = ended(job, place, place.read() if args.resume else None)
    if outcome is None or not adapter.exists():
        again = _resume_command(job.settings.kind, next(iter(job.files.values())), place)
        with service_client(job.settings.model) as service:
            _connect(service, job.settings)
            with _told_how_to_go_on(place, again):
                report = tuple(args.report or ())
                outcome = run(service, job, place.path, resume=args.resume, report=report)
            if outcome.ending == "interrupted":
                say(f"Interrupted after step {outcome.step}; everything up to there is saved.")
                say(f"Resume it with:\n  {again}")
                _summary(args, place, outcome, None)
                # Nothing was raised here, so the server has to be told.
                service.close("interrupted", f"stopped after step {outcome.step}").result()
                return INTERRUPTED
            with doing("Drawing the curves"):
                _draw(place, job.settings)
            with doing(f"Writing the adapter to {adapter}"):
                export_adapter(service, outcome.best.state_path, adapter)
    _summary(args, place, outcome, adapter)
    say(_next_steps(place))
    return None


def _connect(service: ServiceClient, settings: Settings) -> None:
    """Reach the server; one of our own has to start and load its models first."""
    config = service.holder.config
    if config.embedded:
        what = f"Starting the embedded server with {settings.base_model}"
    else:
        what = f"Connecting to {config.base_url}"
    with doing(what):
        service.operations.block(service.holder.opened)


def _next_steps(place: RunFolder) -> str:
    """Commands that do something with what was trained."""
    folder, name = str(place.path), place.path.resolve().name
    commands = (
        ("chat", folder),
        ("sample", "--path", folder, "--prompt", "Hello!"),
        ("run", "plot", folder),
        ("checkpoint", "export", folder, "--layout", "merged", "-o", f"{name}-merged"),
    )
    lines = [f"  {shlex.join(('tinkex', *words))}" for words in commands]
    return "\n".join(
        ["", "Next: chat with it, sample from it, plot it, or export it merged:", *lines]
    )


@contextmanager
def _told_how_to_go_on(place: RunFolder, again: str) -> Generator[None]:
    """Whatever ends a run that was begun, its next step is said."""
    try:
        yield
    except BaseException:
        if place.begun:
            saves = place.checkpoints()
            where = (
                f"after step {saves[-1].step}" if saves else "at its beginning: nothing is saved"
            )
            say(f"Resume the run {where}:\n  {again}")
        raise


def _draw(place: RunFolder, settings: Settings) -> None:
    series = series_of(read_metrics(place.path))
    try:
        for name in _PICTURES:
            write_picture(series, place.path / name, title=f"{settings.kind} {settings.base_model}")
    except (MissingPackageError, InputError) as error:
        say(f"No picture of the run: {error}")


def _summary(
    args: argparse.Namespace, place: RunFolder, outcome: Outcome, adapter: Path | None
) -> None:
    rows = [row for row in read_metrics(place.path) if row["step"] <= outcome.best.step]
    newest: dict[str, float] = {}
    for row in rows:
        newest |= row
    about = {
        "folder": str(place.path),
        "ended": outcome.ending,
        "step": outcome.step,
        "used_step": outcome.best.step,
        "loss": newest.get("loss"),
        "reward": newest.get("reward"),
        "eval_loss": newest.get("eval_loss"),
        "eval_reward": newest.get("eval_reward"),
        "state_path": outcome.best.state_path,
        "sampler_path": outcome.best.sampler_path,
        "adapter": None if adapter is None else str(adapter),
    }
    show_one(args, about, [(name, _short(value)) for name, value in about.items()])


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
