"""`tinkex session`: token totals and traces."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument, Command
from tinkex.cli.connect import admin_client, rest_client
from tinkex.cli.output import plain, print_json, say, show_one, size, utc_now

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from tinkex.types import BillingEventInfo

_HOUR = timedelta(hours=1)
_TOTALS = ("trained_tokens", "prompt_tokens", "cached_tokens", "generated_tokens", "checkpoints")


def usage(args: argparse.Namespace) -> None:
    """Show a session's token totals."""
    since = _since(args.since)
    totals: dict[str, int] = dict.fromkeys(_TOTALS, 0)
    seen = False
    with admin_client() as admin:
        # All windows at once: one after the other would take as many round trips.
        pages = [admin.get_billing_usage(start, end) for start, end in _windows(since)]
        for event in (event for page in pages for event in page.result().data):
            if event.session_id == args.session_id:
                seen = True
                for name, amount in _amounts(event.event_info):
                    totals[name] += amount
    if not seen:
        say(f"No usage of {args.session_id} since {since:%Y-%m-%d %H:%M} UTC.")
    show_one(
        args,
        {"session_id": args.session_id, "since": since.isoformat(), **totals},
        [
            ("Session", args.session_id),
            ("Since", f"{since:%Y-%m-%d %H:%M} UTC"),
            ("Tokens trained", totals["trained_tokens"]),
            ("Tokens in prompts", totals["prompt_tokens"]),
            ("  of these cached", totals["cached_tokens"]),
            ("Tokens generated", totals["generated_tokens"]),
            ("Checkpoints saved", totals["checkpoints"]),
        ],
    )


def export_trace(args: argparse.Namespace) -> None:
    """Save a trace for Perfetto."""
    from tinkex.cli.fetch import fetch

    target = Path(args.output or f"{args.session_id}.pftrace")
    with rest_client() as rest:
        if args.format == "table" and not args.url_only:
            say("Waiting for the server to write the trace …")
        url = rest.export_session_trace(args.session_id).result()
        config = rest.holder.config
    if args.url_only:
        if args.format == "json":
            print_json({"session_id": args.session_id, "url": url})
        else:
            print(url)
        return
    size_bytes = fetch(url, target, target.name, config)
    show_one(
        args,
        {
            "session_id": args.session_id,
            "destination": str(target),
            "file_size_bytes": size_bytes,
        },
        [("Session", args.session_id), ("Saved to", target), ("Size", size(size_bytes))],
    )


def _amounts(info: BillingEventInfo) -> Iterable[tuple[str, int]]:
    event = plain(info)
    match event["type"]:
        case "training":
            yield "trained_tokens", event["token_count"]
        case "sampling_prefill":
            yield "prompt_tokens", event["token_count"]
            if event["cached"]:
                yield "cached_tokens", event["token_count"]
        case "sampling_sample":
            yield "generated_tokens", event["token_count"]
        case "checkpoint":
            yield "checkpoints", event["count"]
        case _:  # storage belongs to checkpoints, not to a session
            pass


def _since(text: str | None) -> datetime:
    from tinkex.clients.admin import LONGEST_USAGE_WINDOW

    now = utc_now()
    if text is None:
        return _hour(now) + _HOUR - LONGEST_USAGE_WINDOW
    try:
        since = datetime.fromisoformat(text)
    except ValueError:
        raise misuse(f"--since: {text!r} is not an ISO 8601 time", "Write 2026-01-31.") from None
    since = _hour(since if since.tzinfo else since.replace(tzinfo=UTC))
    if since > now:
        raise CommandError(f"--since: {text} is in the future")
    return since


def _windows(since: datetime) -> Iterator[tuple[datetime, datetime]]:
    """From `since` to the end of this hour, in windows that the server accepts."""
    from tinkex.clients.admin import LONGEST_USAGE_WINDOW

    end = _hour(utc_now()) + _HOUR
    while since < end:
        stop = min(since + LONGEST_USAGE_WINDOW, end)
        yield since, stop
        since = stop


def _hour(time: datetime) -> datetime:
    return time.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


_SESSION = Argument("session_id SESSION_ID")

VERBS = {
    "usage": Command(
        usage,
        _SESSION,
        Argument("--since DATE", "count from this UTC hour on (default: 14 days ago)"),
    ),
    "export-trace": Command(
        export_trace,
        _SESSION,
        Argument("-o --output FILE", "default: SESSION_ID.pftrace"),
        Argument("--url-only", "print a link and save nothing"),
    ),
}
