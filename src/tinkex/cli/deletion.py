"""`tinkex checkpoint delete`: choosing, asking, deleting, and an honest account of it."""

from __future__ import annotations

import sys
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.connect import rest_client
from tinkex.cli.failures import CommandError, describe, misuse
from tinkex.cli.main import FAILED
from tinkex.cli.output import print_json, say, size, when
from tinkex.errors import TinkerError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from tinkex.clients.rest import RestClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import Checkpoint

_AT_ONCE = 32
_SHOWN = 10
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def delete(args: argparse.Namespace) -> int | None:
    """Delete checkpoints for good; fails when a single one could not be deleted."""
    _check(args)
    with rest_client() as rest:
        paths, lines = _chosen(args, rest)
        if not paths:
            say("No checkpoints match.")
            _account(args, 0, [])
            return None
        if not args.yes and not _confirmed(lines):
            raise CommandError("Nothing was deleted", "Answer y, or pass --yes, to delete.")
        failed = list(_delete_all(rest, paths))
    _account(args, len(paths) - len(failed), failed)
    return FAILED if failed else None


def _check(args: argparse.Namespace) -> None:
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
    """The paths to delete, and how to name them to a person."""
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
    say(f"This deletes {len(lines)} checkpoint(s) for good:")
    for line in lines[:_SHOWN]:
        say(f"  {line}")
    if len(lines) > _SHOWN:
        say(f"  and {len(lines) - _SHOWN} more")
    print("Delete? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:  # end of input: nobody is there to say yes
        say("")
    return answer.strip().lower() in ("y", "yes")


def _delete_all(rest: RestClient, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Delete, many at once; the failures, each with its reason."""
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


def _account(args: argparse.Namespace, deleted: int, failed: list[tuple[str, str]]) -> None:
    if args.format == "json":
        problems = [{"tinker_path": path, "error": reason} for path, reason in failed]
        print_json({"deleted_count": deleted, "failed": problems})
    else:
        print(f"Deleted {deleted} checkpoint(s)")
    for path, reason in failed:
        say(f"Not deleted: {path}: {reason}")
