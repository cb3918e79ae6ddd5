"""`tinkex checkpoint`: list, show, share, expire and delete checkpoints."""

from __future__ import annotations

import sys
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError, describe, misuse, unknown_checkpoint
from tinkex.cli.commands import FAILED, LIMIT, PATH, PATH_OR_RUN, Argument, Command
from tinkex.cli.connect import every_page, rest_client
from tinkex.cli.export import DOWNLOAD, EXPORT, IMPORT
from tinkex.cli.output import plain, print_json, say, show, show_one, size, when
from tinkex.cli.push_hf import PUSH
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from tinkex.clients.rest import RestClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import Checkpoint

_PAGE = 1000
_AT_ONCE = 32
_SHOWN = 10
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_COLUMNS = ("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path")


def list_all(args: argparse.Namespace) -> None:
    """List checkpoints, newest first."""
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
    from tinkex.cli.target import checkpoint_named
    from tinkex.types import ParsedCheckpointTinkerPath

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
    """Let all users load a checkpoint."""
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


# -- deleting ------------------------------------------------------------------------------------


def delete(args: argparse.Namespace) -> int | None:
    """Delete checkpoints permanently. Fails if any of them cannot be deleted."""
    _check(args)
    with rest_client() as rest:
        paths, lines = _chosen(args, rest)
        if not paths:
            say("No checkpoints match.")
            _report(args, 0, [])
            return None
        if not args.yes and not _confirmed(lines):
            raise CommandError("Nothing was deleted", "Answer y, or pass --yes, to delete.")
        failed = list(_delete_all(rest, paths))
    _report(args, len(paths) - len(failed), failed)
    return FAILED if failed else None


def _check(args: argparse.Namespace) -> None:
    from tinkex.types import ParsedCheckpointTinkerPath

    if bool(args.paths) == bool(args.run_id):
        raise misuse(
            "Give either checkpoint paths or --run-id", "`tinkex checkpoint list` shows both."
        )
    if not args.run_id and (args.kind or args.before or args.after):
        raise misuse(
            "--type, --before and --after choose among the checkpoints of a run",
            "Name the run with --run-id; `tinkex run list` shows the ids.",
        )
    for path in args.paths:
        ParsedCheckpointTinkerPath.from_tinker_path(path)


def _chosen(args: argparse.Namespace, rest: RestClient) -> tuple[list[str], list[str]]:
    """The paths to delete, and the lines that describe them."""
    if args.paths:
        paths = list(dict.fromkeys(args.paths))
        return paths, paths
    before, after = _date(args.before, "--before"), _date(args.after, "--after")
    kind = _TYPES.get(args.kind, args.kind)
    found = [
        one
        for one in rest.list_checkpoints(args.run_id).result().checkpoints
        if kind in (None, one.checkpoint_type)
        and (before is None or one.time < before)
        and (after is None or one.time > after)
    ]
    return [one.tinker_path for one in found], [_line(one) for one in found]


def _line(one: Checkpoint) -> str:
    return f"{one.tinker_path} ({size(one.size_bytes) or 'unknown size'}, {when(one.time)})"


def _date(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise misuse(
            f"{option}: {text!r} is not an ISO 8601 date",
            "Write 2026-01-31 or 2026-01-31T08:00:00Z.",
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _confirmed(lines: Sequence[str]) -> bool:
    say(f"This deletes {len(lines)} checkpoint(s) permanently:")
    for line in lines[:_SHOWN]:
        say(f"  {line}")
    if len(lines) > _SHOWN:
        say(f"  and {len(lines) - _SHOWN} more")
    print("Delete? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:  # end of input: no terminal to answer on
        say("")
    return answer.strip().lower() in ("y", "yes")


def _delete_all(rest: RestClient, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Delete with many requests in flight; yields the failures, each with its reason."""
    under_way: deque[tuple[str, APIFuture[None]]] = deque()

    def next_failure() -> Iterator[tuple[str, str]]:
        path, future = under_way.popleft()
        try:
            future.result()
        except TinkerError as error:
            yield path, describe(error)

    for path in paths:
        if len(under_way) == _AT_ONCE:
            yield from next_failure()
        under_way.append((path, rest.delete_checkpoint_from_tinker_path(path)))
    while under_way:
        yield from next_failure()


def _report(args: argparse.Namespace, deleted: int, failed: list[tuple[str, str]]) -> None:
    if args.format == "json":
        problems = [{"tinker_path": path, "error": reason} for path, reason in failed]
        print_json({"deleted_count": deleted, "failed": problems})
    else:
        print(f"Deleted {deleted} checkpoint(s)")
    for path, reason in failed:
        say(f"Not deleted: {path}: {reason}")


VERBS = {
    "list": Command(
        list_all,
        Argument("--run-id ID", "only this training run, and all of its checkpoints"),
        LIMIT,
    ),
    "info": Command(info, PATH_OR_RUN),
    "publish": Command(publish, PATH),
    "unpublish": Command(unpublish, PATH),
    "set-ttl": Command(
        set_ttl,
        PATH,
        Argument("--ttl SECONDS", "seconds until it expires", type=int),
        Argument("--remove", "never expire"),
    ),
    "delete": Command(
        delete,
        Argument("paths PATH", "checkpoints to delete", nargs="*"),
        Argument("--run-id ID", "delete those of this training run"),
        Argument(
            "--type KIND",
            "with --run-id: only weights, sampler_weights or external_weights",
            dest="kind",
            choices=(*_TYPES, *_TYPES.values()),
        ),
        Argument("--before DATE", "with --run-id: only older (ISO, UTC)"),
        Argument("--after DATE", "with --run-id: only newer (ISO, UTC)"),
        Argument("-y --yes", "do not ask for confirmation"),
    ),
    "download": DOWNLOAD,
    "export": EXPORT,
    "import": IMPORT,
    "push-hf": PUSH,
}
