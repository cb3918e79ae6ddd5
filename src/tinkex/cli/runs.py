"""`tinkex run`: training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.connect import rest_client
from tinkex.cli.failures import misuse
from tinkex.cli.output import plain, show, show_one, when
from tinkex.cli.paging import every_page

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tinkex.types import TrainingRun

_PAGE = 100

_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], object]]] = {
    "id": ("Run ID", lambda run: run.training_run_id),
    "model": ("Base Model", lambda run: run.base_model),
    "owner": ("Owner", lambda run: run.model_owner),
    "lora": ("LoRA", lambda run: _lora(run)),
    "updated": ("Last Update", lambda run: when(run.last_request_time)),
    "status": ("Status", lambda run: "Failed" if run.corrupted else "Active"),
    "checkpoint": ("Last Checkpoint", lambda run: _last(run)[0]),
    "checkpoint_time": ("Checkpoint Time", lambda run: _last(run)[1]),
}


def list_all(args: argparse.Namespace) -> None:
    """List training runs."""
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
    show(
        args,
        {"runs": [plain(run) for run in runs]},
        [_COLUMNS[name][0] for name in columns],
        [[_COLUMNS[name][1](run) for name in columns] for run in runs],
        empty="No training runs.",
    )


def info(args: argparse.Namespace) -> None:
    """Show one training run."""
    with rest_client() as rest:
        run = rest.get_training_run(args.run_id).result()
    checkpoint, saved = _last(run)
    show_one(
        args,
        plain(run),
        [
            *((title, value(run)) for title, value in list(_COLUMNS.values())[:6]),
            ("Last Checkpoint", checkpoint),
            ("Checkpoint Time", saved),
            *((f"Metadata {name}", value) for name, value in (run.user_metadata or {}).items()),
        ],
    )


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
