"""`tinkex run`: list, show, watch and plot training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.cli.command_errors import misuse
from tinkex.cli.commands import LIMIT, Argument, Command
from tinkex.cli.connect import every_page, rest_client
from tinkex.cli.output import plain, show, show_one, when
from tinkex.cli.plot import PLOT
from tinkex.cli.watch import WATCH

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tinkex.cli.run_status import RunStatus
    from tinkex.types import TrainingRun

_PAGE = 100

_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun, RunStatus], object]]] = {
    "id": ("Run ID", lambda run, _: run.training_run_id),
    "model": ("Base Model", lambda run, _: run.base_model),
    "owner": ("Owner", lambda run, _: run.model_owner),
    "lora": ("LoRA", lambda run, _: _lora(run)),
    "updated": ("Last Update", lambda run, _: when(run.last_request_time)),
    "status": ("Status", lambda _, state: state.status.capitalize()),
    "checkpoint": ("Last Checkpoint", lambda run, _: _last(run)[0]),
    "checkpoint_time": ("Checkpoint Time", lambda run, _: _last(run)[1]),
    "folder": ("Folder", lambda _, state: state.folder),
}


def list_all(args: argparse.Namespace) -> None:
    """List training runs."""
    from tinkex.cli.run_status import statuses_of

    columns = _chosen(args.columns)
    with rest_client() as rest:
        runs = list(
            every_page(
                lambda limit, offset: rest.list_training_runs(limit, offset).result(),
                lambda page: page.training_runs,
                args.limit,
                _PAGE,
            )
        )
        found = statuses_of(rest, runs)
        known = [(run, found[run.training_run_id]) for run in runs]
    show(
        args,
        {"runs": [_plain(run, state) for run, state in known]},
        [_COLUMNS[name][0] for name in columns],
        [[_COLUMNS[name][1](run, state) for name in columns] for run, state in known],
        empty="No training runs.",
    )


def info(args: argparse.Namespace) -> None:
    """Show one training run."""
    from tinkex.cli.run_status import statuses_of

    with rest_client() as rest:
        run = rest.get_training_run(args.run_id).result()
        state = statuses_of(rest, [run])[run.training_run_id]
    show_one(
        args,
        _plain(run, state),
        [
            *((title, value(run, state)) for title, value in _COLUMNS.values()),
            *((f"Metadata {name}", value) for name, value in (run.user_metadata or {}).items()),
        ],
    )


def _plain(run: TrainingRun, state: RunStatus) -> dict[str, Any]:
    folder = {} if state.folder is None else {"folder": str(state.folder)}
    return {**plain(run), "status": state.status, **folder}


def _chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or not names:
        what = f"unknown column {unknown[0]!r}" if unknown else "no columns given"
        raise misuse(f"--columns: {what}", f"Choose from {', '.join(_COLUMNS)}.")
    return names


def _lora(run: TrainingRun) -> str:
    if not run.is_lora:
        return "No"
    return "Yes" if run.lora_rank is None else f"Rank {run.lora_rank}"


def _last(run: TrainingRun) -> tuple[str | None, str | None]:
    """The newer of the two last checkpoints: its id, and when it was saved."""
    saved = [one for one in (run.last_checkpoint, run.last_sampler_checkpoint) if one]
    if not saved:
        return None, None
    newest = max(saved, key=lambda one: one.time)
    return newest.checkpoint_id, when(newest.time)


VERBS = {
    "list": Command(
        list_all,
        LIMIT,
        Argument(
            "-c --columns A,B",
            "of id, model, owner, lora, updated, status, checkpoint, checkpoint_time, folder",
            default="id,model,lora,updated,status",
        ),
    ),
    "info": Command(info, Argument("run_id RUN_ID")),
    "watch": WATCH,
    "plot": PLOT,
}
