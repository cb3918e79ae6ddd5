"""`tinkex billing`: usage by the hour, and the storage of checkpoints."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinkex.cli.commands import Argument, Command
from tinkex.cli.connect import admin_client
from tinkex.cli.output import plain, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence
    from typing import TextIO

    from tinkex.types import BillingUsageEvent

_USAGE = ("Hour", "Kind", "Quantity", "Model", "Session", "Cost (USD)")
_QUANTITIES = (("token_count", "tokens"), ("count", "checkpoints"), ("gigabyte_hours", "GB hours"))


def usage(args: argparse.Namespace) -> None:
    """Show usage by the hour."""
    with admin_client() as admin:
        used = admin.get_billing_usage(args.starting_on, args.ending_before).result()
    sessions = {name: plain(session) for name, session in used.sessions.items()}
    if args.csv:
        _write_csv(args.csv, [_flat(event) for event in used.data])
    if args.sessions_csv:
        rows = [
            {"session_id": name, "user_metadata": json.dumps(session["user_metadata"])}
            for name, session in sessions.items()
        ]
        _write_csv(args.sessions_csv, rows)
    if args.csv or args.sessions_csv:
        return
    through = used.cost_data_through
    show(
        args,
        {
            "data": [plain(event) for event in used.data],
            "sessions": sessions,
            "cost_data_through": None if through is None else through.isoformat(),
        },
        _USAGE,
        [_row(event) for event in used.data],
        empty="No usage in that time.",
    )


def checkpoint_storage(args: argparse.Namespace) -> None:
    """Show the storage used by checkpoints."""
    with admin_client() as admin:
        used = admin.get_current_checkpoint_storage_usage(args.project_id).result()
    items = [plain(item) for item in used.data]
    if args.csv:
        _write_csv(args.csv, items)
        return
    show(
        args,
        {
            "effective_rate_usd_per_gigabyte_month": used.effective_rate_usd_per_gigabyte_month,
            "data": items,
        },
        ("Project", "User", "Checkpoints", "GB", "USD per Month"),
        [
            (
                item.project_id,
                item.user_email or item.user_name or item.org_user_urn,
                item.checkpoint_count,
                f"{item.size_gigabytes:.3f}",
                _money(item.estimated_monthly_cost_usd),
            )
            for item in used.data
        ],
        empty="Nothing is stored.",
    )


def _row(event: BillingUsageEvent) -> tuple[object, ...]:
    info = plain(event.event_info)
    kind = f"{info['type']} (cached)" if info.get("cached") else info["type"]
    field, unit = next(pair for pair in _QUANTITIES if pair[0] in info)
    return (
        f"{event.bucket_start:%Y-%m-%d %H:%M}",
        kind,
        f"{info[field]} {unit}",
        event.base_model,
        event.session_id,
        _money(event.estimated_cost_usd),
    )


def _money(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:.4f}"


def _flat(event: BillingUsageEvent) -> dict[str, Any]:
    row = plain(event)
    return {**row, **row.pop("event_info")}


def _write_csv(target: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with _opened(target) as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def _opened(target: str) -> Generator[TextIO]:
    if target == "-":
        yield sys.stdout
        return
    with open(target, "w", encoding="utf-8", newline="") as file:
        yield file


_CSV = Argument("--csv FILE", "write CSV to FILE instead; - is standard output")

VERBS = {
    "usage": Command(
        usage,
        Argument("starting_on STARTING_ON", "a full UTC hour, included"),
        Argument("ending_before ENDING_BEFORE", "a full UTC hour, excluded; at most 14 days later"),
        _CSV,
        Argument("--sessions-csv FILE", "write the metadata of sessions as CSV"),
    ),
    "checkpoint-storage": Command(
        checkpoint_storage,
        Argument("--project-id ID", "only this project"),
        _CSV,
    ),
}
