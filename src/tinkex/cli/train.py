"""`tinkex train`: ready-made training loops, each run in its own folder.

The arguments have no defaults here: a missing one comes from the settings in `tinkex.loops`, or for
a resumed run from the run's folder.
"""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.cli.command_errors import misuse
from tinkex.cli.commands import INTERRUPTED, Argument, Command
from tinkex.cli.connect import service_client
from tinkex.cli.export import export_adapter
from tinkex.cli.output import say, show_one
from tinkex.errors import InputError, MissingPackageError
from tinkex.tracking.figure import write_picture
from tinkex.tracking.history import read_metrics
from tinkex.tracking.series import series_of
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from tinkex.clients.service import ServiceClient
    from tinkex.loops.run_folder import RunFolder
    from tinkex.loops.run_job import Job
    from tinkex.loops.run_settings import Settings
    from tinkex.loops.training_loop import Outcome

    S = TypeVar("S", bound=Settings)

ADAPTER = "adapter"
_FIGURES = ("curve.svg", "curve.png")


def sft(args: argparse.Namespace) -> int | None:
    """Supervised fine-tuning on examples."""
    from tinkex.loops.run_settings import SftSettings
    from tinkex.loops.sft import SftJob

    with _named_as_options():
        place = _place(args, Path(args.data), "sft")
        settings = _settings(args, place, SftSettings)
        return _train(args, place, SftJob(settings, Path(args.data), _eval_file(args, place)))


def dpo(args: argparse.Namespace) -> int | None:
    """Direct preference optimization on pairs of answers."""
    from tinkex.loops.dpo import DpoJob
    from tinkex.loops.run_settings import DpoSettings

    with _named_as_options():
        place = _place(args, Path(args.data), "dpo")
        settings = _settings(args, place, DpoSettings)
        return _train(args, place, DpoJob(settings, Path(args.data), _eval_file(args, place)))


def rl(args: argparse.Namespace) -> int | None:
    """Reinforcement learning with a reward function."""
    from tinkex.loops.rl import RlJob
    from tinkex.loops.run_settings import RlSettings

    with _named_as_options():
        place = _place(args, Path(args.task), "rl")
        return _train(args, place, RlJob(_settings(args, place, RlSettings), Path(args.task)))


# -- arguments ------------------------------------------------------------------------


def _place(args: argparse.Namespace, source: Path, kind: str) -> RunFolder:
    """The run's folder; raises a `CommandError` when it does not fit `--resume`."""
    from tinkex.loops.run_folder import RunFolder

    place = RunFolder(Path(args.output or Path("runs") / f"{source.stem}-{kind}"))
    if args.resume and place.read() is None:
        raise misuse(
            f"There is no run to resume in {place.path}",
            "Leave --resume out to begin one, or name its folder with --output.",
        )
    if not args.resume and place.started:
        raise misuse(
            f"{place.path} already holds a run",
            f"Resume it:  {_resume_command(kind, source, place)}\n"
            "Or start another run in a new folder, with --output DIR.",
        )
    return place


def _settings(args: argparse.Namespace, place: RunFolder, kind: type[S]) -> S:
    """The given settings; the others from the resumed run, or the defaults."""
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    record = place.read() if args.resume else None
    known: dict[str, Any] = {} if record is None else record.settings
    return kind(**({name: known[name] for name in names & known.keys()} | given))


@contextmanager
def _named_as_options() -> Generator[None]:
    """Rename a setting in an error to its option on the command line."""
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


# -- training ----------------------------------------------------------------------------------


def _train(args: argparse.Namespace, place: RunFolder, job: Job) -> int | None:
    from tinkex.loops.run_job import ended, run

    adapter = place.path / ADAPTER
    outcome = ended(job, place, place.read() if args.resume else None)
    if outcome is None or not adapter.exists():
        again = _resume_command(job.settings.kind, next(iter(job.files.values())), place)
        with service_client(job.settings.model) as service:
            _connect(service, job.settings)
            with _hint_to_resume(place, again):
                report = tuple(args.report or ())
                outcome = run(service, job, place.path, resume=args.resume, report=report)
            if outcome.ending == "interrupted":
                say(f"Interrupted after step {outcome.step}; everything up to there is saved.")
                say(f"Resume it with:\n  {again}")
                _summary(args, place, outcome, None)
                # No exception tells the server that the session was interrupted.
                service.close("interrupted", f"stopped after step {outcome.step}").result()
                return INTERRUPTED
            with doing("Drawing the curves"):
                write_figures(place.path, f"{job.settings.kind} {job.settings.base_model}")
            with doing(f"Writing the adapter to {adapter}"):
                export_adapter(service, outcome.best.state_path, adapter)
    _summary(args, place, outcome, adapter)
    say(_next_steps(place))
    return None


def _connect(service: ServiceClient, settings: Settings) -> None:
    """Reach the server; an embedded server starts and loads its models first."""
    config = service.holder.config
    if config.embedded:
        what = f"Starting the embedded server with {settings.base_model}"
    else:
        what = f"Connecting to {config.base_url}"
    with doing(what):
        service.operations.block(service.holder.opened)


def _next_steps(place: RunFolder) -> str:
    """Commands for the trained adapter."""
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
def _hint_to_resume(place: RunFolder, again: str) -> Generator[None]:
    """Print how to resume when an exception ends a run."""
    try:
        yield
    except BaseException:
        if place.started:
            saves = place.checkpoints()
            where = (
                f"after step {saves[-1].step}" if saves else "at its beginning: nothing is saved"
            )
            say(f"Resume the run {where}:\n  {again}")
        raise


def write_figures(folder: Path, title: str) -> list[str]:
    """Draw the curves of a run into its folder; returns the names of the files."""
    series = series_of(read_metrics(folder))
    try:
        for name in _FIGURES:
            write_picture(series, folder / name, title=title)
    except (MissingPackageError, InputError) as error:
        say(f"No figure of the run: {error}")
        return []
    return list(_FIGURES)


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


# -- commands ----------------------------------------------------------------------------------

_PLACE = (
    Argument(
        "--model NAME[=FOLDER]",
        "the model to start from (default: HuggingFaceTB/SmolLM2-135M-Instruct)",
    ),
    Argument("--output DIR", "the run's folder (default: runs/FILE-KIND)"),
)
_FILES = (
    Argument("data DATA.jsonl", "training data: see `tinkex data view`"),
    *_PLACE,
    Argument("--eval FILE", "evaluate with these examples"),
    Argument(
        "--eval-fraction X", "hold out this fraction of the data to evaluate with", type=float
    ),
)
_COMMON = (
    Argument("--rank N", "rank of the LoRA adapter (default: 16)", type=int),
    Argument(
        "--lr-schedule NAME",
        "constant, linear (decay to 0) or cosine",
        choices=("constant", "linear", "cosine"),
    ),
    Argument("--warmup N", "warmup steps of the learning rate", type=int),
    Argument("--seed N", "seed of initialization and data order (default: 0)", type=int),
    Argument("--save-every N", "save every N steps (default: 10 times in all)", type=int),
    Argument("--eval-every N", "evaluate every N steps (default: 10 times in all)", type=int),
    Argument(
        "--patience N",
        "stop after N evaluations without improvement; the best step is kept",
        type=int,
    ),
    Argument(
        "--report WHERE",
        "also log to tensorboard, wandb or wandb:PROJECT; may be repeated",
        action="append",
    ),
    Argument("--resume", "continue the run in the folder"),
)


def _steps(epochs: int | None, batch: str, rate: str) -> tuple[Argument, ...]:
    """The length and the batch of a run, with the defaults of its kind."""
    passes = Argument("--epochs N", f"passes over the data (default: {epochs})", type=int)
    return (
        Argument("--steps N", "the number of optimizer steps", type=int),
        *([passes] if epochs else []),
        Argument("--batch-size N", f"{batch} per step (default: 8)", type=int),
        Argument("--learning-rate X", f"the peak learning rate (default: {rate})", type=float),
    )


_LONGEST = Argument("--max-tokens N", "the longest allowed example (default: 2048)", type=int)

VERBS = {
    "sft": Command(
        sft,
        *_FILES,
        *_steps(3, "examples", "3e-4"),
        Argument(
            "--train-on WHICH",
            "all of an assistant's messages, or the last (default: all)",
            choices=("all", "last"),
        ),
        _LONGEST,
        *_COMMON,
    ),
    "dpo": Command(
        dpo,
        *_FILES,
        *_steps(1, "pairs", "5e-5"),
        Argument(
            "--beta X",
            "strength of the KL penalty towards the base model (default: 0.1)",
            type=float,
        ),
        _LONGEST,
        *_COMMON,
    ),
    "rl": Command(
        rl,
        Argument("task TASK.py", "a file with prompts() and reward(prompt, answer)"),
        *_PLACE,
        *_steps(None, "prompts", "3e-4"),
        Argument("--group-size N", "answers per prompt (default: 8)", type=int),
        Argument("--max-tokens N", "the most tokens per answer (default: 128)", type=int),
        Argument("--temperature X", "sampling temperature of the answers (default: 1)", type=float),
        *_COMMON,
    ),
}
