"""`tinkex doctor`: what is installed, configured and reachable, and what to do about the rest."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from tinkex.cli.examination import machine, server
from tinkex.cli.main import FAILED
from tinkex.cli.output import print_json, text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tinkex.cli.examination.finding import Finding

_NAME_WIDTH = 14
_INDENT = " " * (len("fail") + 2)


def doctor(args: argparse.Namespace) -> int | None:
    """Examine everything; fails when something that is in use does not work."""
    found: list[Finding] = []
    for finding in _findings():
        found.append(finding)
        if args.format != "json":
            print(_lines(finding, _width()), flush=True)
    failed = [finding for finding in found if finding.status == "fail"]
    if args.format == "json":
        print_json({"ok": not failed, "checks": [finding.plain() for finding in found]})
    elif not failed:
        print("\nEverything that is in use works.", file=sys.stderr)
    return FAILED if failed else None


def _findings() -> Iterator[Finding]:
    yield from machine.findings()
    yield from server.findings()


def _lines(finding: Finding, width: int) -> str:
    head = f"{finding.status:4}  {finding.name:{_NAME_WIDTH}}"
    first = textwrap.wrap(
        text(finding.found),
        width,
        initial_indent=head,
        subsequent_indent=_INDENT + " " * _NAME_WIDTH,
        break_on_hyphens=False,
    )
    then = textwrap.wrap(
        text(finding.todo),
        width,
        initial_indent=f"{_INDENT}-> ",
        subsequent_indent=f"{_INDENT}   ",
        # What is to be typed must stay in one piece.
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join((*first, *(then if finding.todo else ())))


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns
