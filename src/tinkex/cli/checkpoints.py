"""`tinkex checkpoint`: list, describe, share and keep checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.connect import rest_client
from tinkex.cli.failures import misuse
from tinkex.cli.output import plain, show, show_one, size, when
from tinkex.cli.paging import every_page
from tinkex.cli.target import checkpoint as checkpoint_named
from tinkex.cli.target import unknown_checkpoint
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    import argparse

    from tinkex.types import Checkpoint

_PAGE = 1000
_COLUMNS = ("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path")


def list_all(args: argparse.Namespace) -> None:
    """List checkpoints: the newest, or all of one run."""
    with rest_client() as rest:
        if args.run_id:
            found = rest.list_checkpoints(args.run_id).result().checkpoints
        else:
            found = list(
                every_page(
                    lambda limit, offset: rest.list_user_checkpoints(limit, offset).result(),
                    lambda page: page.checkpoints,
                    args.limit,
                    _PAGE,
                )
            )
    data = {"checkpoints": [plain(one) for one in found]}
    show(
        args,
        {"run_id": args.run_id, **data} if args.run_id else data,
        _COLUMNS,
        [
            (
                one.checkpoint_id,
                one.checkpoint_type,
                size(one.size_bytes),
                one.public,
                when(one.time),
                when(one.expires_at) or "Never",
                one.tinker_path,
            )
            for one in found
        ],
        empty="No checkpoints.",
    )


def info(args: argparse.Namespace) -> None:
    """Show one checkpoint."""
    path = checkpoint_named(args.path).model
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    with rest_client() as rest:
        listed, run = (
            rest.list_checkpoints(parsed.training_run_id),
            rest.get_training_run(parsed.training_run_id),
        )
        checkpoint = _find(listed.result().checkpoints, path)
        training_run = run.result()
    show_one(
        args,
        {
            **plain(checkpoint),
            "is_lora": training_run.is_lora,
            "lora_rank": training_run.lora_rank,
        },
        [
            ("Checkpoint ID", checkpoint.checkpoint_id),
            ("Type", checkpoint.checkpoint_type),
            ("Tinker Path", checkpoint.tinker_path),
            ("Size", size(checkpoint.size_bytes)),
            ("Public", checkpoint.public),
            ("Created", when(checkpoint.time)),
            ("Expires", when(checkpoint.expires_at) or "Never"),
            ("Training Run", parsed.training_run_id),
            ("Base Model", training_run.base_model),
            ("LoRA", training_run.is_lora),
            ("LoRA Rank", training_run.lora_rank),
            *(
                (f"Metadata {name}", value)
                for name, value in (checkpoint.user_metadata or {}).items()
            ),
        ],
    )


def publish(args: argparse.Namespace) -> None:
    """Let everybody use a checkpoint."""
    with rest_client() as rest:
        rest.publish_checkpoint_from_tinker_path(args.path).result()


def unpublish(args: argparse.Namespace) -> None:
    """Make a checkpoint private."""
    with rest_client() as rest:
        rest.unpublish_checkpoint_from_tinker_path(args.path).result()


def set_ttl(args: argparse.Namespace) -> None:
    """Set when a checkpoint expires."""
    if (args.ttl is None) != args.remove:
        raise misuse("give either --ttl SECONDS or --remove")
    with rest_client() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(args.path, args.ttl).result()


def _find(checkpoints: list[Checkpoint], path: str) -> Checkpoint:
    for checkpoint in checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise unknown_checkpoint(path)
