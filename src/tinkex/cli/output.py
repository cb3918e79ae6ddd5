"""Results on standard output: a table, or JSON with `--format json`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tinkex.clock import SystemClock

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_GAP = 2
_MISSING = "N/A"
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
# The seconds of a unit of time, and its name.
_SPANS = ((604800, "week"), (86400, "day"), (3600, "hour"), (60, "minute"))
_DATES_FROM_S = 30 * 86400


def show(
    args: argparse.Namespace,
    data: object,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str = "",
) -> None:
    """Print `data` as JSON or `rows` as a table; `empty` is the message without rows."""
    if args.format == "json":
        print_json(data)
        return
    cells = [[text(value) for value in row] for row in rows]
    if not cells and empty:
        print(empty, file=sys.stderr)
        return
    print_table(columns, cells)


def show_one(args: argparse.Namespace, data: object, pairs: Iterable[tuple[str, object]]) -> None:
    """Print one object: `data` as JSON, or the properties that are not None."""
    if args.format == "json":
        print_json(data)
        return
    known = [(name, text(value)) for name, value in pairs if value is not None]
    print(_block(known, _terminal_width()))


def print_json(data: object) -> None:
    """JSON, indented, with times in ISO 8601."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table where it fits the terminal, else one block per row; nothing is truncated."""
    width = _terminal_width()
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(widths) + _GAP * (len(widths) - 1) > width:
        blocks = (_block(list(zip(columns, row, strict=True)), width) for row in rows)
        print("\n\n".join(blocks))
    elif not _print_rich(columns, rows):
        for cells in (columns, ["-" * each for each in widths], *rows):
            print(_line(cells, widths))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return (" " * _GAP).join(padded).rstrip()


def _block(pairs: Sequence[tuple[str, str]], width: int) -> str:
    """Names and values, one per line; a long value is on the next line."""
    indent = max((len(name) for name, _ in pairs), default=0) + 1 + _GAP
    return "\n".join(
        f"{name + ':':{indent}}{value}".rstrip()
        if indent + len(value) <= width
        else f"{name}:\n  {value}"
        for name, value in pairs
    )


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print in colour on a terminal, if rich is installed; returns whether it did."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, style="cyan" if index == 0 else None, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(emoji=False, markup=False, highlight=False).print(table)
    return True


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


# -- values ------------------------------------------------------------------------------------


def text(value: object) -> str:
    """A cell: yes or no for booleans, N/A for None, control characters escaped."""
    if value is None:
        return _MISSING
    if isinstance(value, bool):
        return "Yes" if value else "No"
    shown = str(value)
    # Names and metadata come from other users: they must not control the terminal.
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode()


def harmless(text: str) -> str:
    """Text of several lines, without characters that control the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def size(size_bytes: int | None) -> str | None:
    """A number of bytes in the largest unit of which there is at least one."""
    if size_bytes is None:
        return None
    amount, power = float(size_bytes), 0
    while amount >= 1024 and power < len(_UNITS) - 1:
        amount, power = amount / 1024, power + 1
    return f"{size_bytes} B" if power == 0 else f"{amount:.1f} {_UNITS[power]}"


def when(time: datetime | None, now: datetime | None = None) -> str | None:
    """A time relative to now, such as "2 hours ago"; a date if it is more than a month away."""
    if time is None:
        return None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    seconds = ((now or utc_now()) - time).total_seconds()
    if abs(seconds) < _SPANS[-1][0]:
        return "just now" if seconds >= 0 else "in a moment"
    if abs(seconds) >= _DATES_FROM_S:
        return f"{time.astimezone(UTC):%Y-%m-%d}"
    length, unit = next(span for span in _SPANS if abs(seconds) >= span[0])
    count = int(abs(seconds) // length)
    phrase = f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{phrase} ago" if seconds >= 0 else f"in {phrase}"


def utc_now() -> datetime:
    """The current time."""
    return datetime.fromtimestamp(SystemClock().wall(), UTC)


def plain(value: Any) -> Any:
    """A response as JSON values."""
    return value.model_dump(mode="json")


def say(message: str) -> None:
    """Print a message on standard error, apart from the results."""
    print(message, file=sys.stderr)
