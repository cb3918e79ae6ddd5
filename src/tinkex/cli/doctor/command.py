"""`tinkex doctor`: what is installed, configured and reachable, and the next step otherwise."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from tinkex.cli.commands import FAILED
from tinkex.cli.output import print_json, text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tinkex.cli.commands import Argument
    from tinkex.cli.doctor.machine_checks import Finding

ARGUMENTS: tuple[Argument, ...] = ()

_NAME_WIDTH = 14
_INDENT = " " * (len("fail") + 2)


def doctor(args: argparse.Namespace) -> int | None:
    """Run all checks; fails when something that is in use does not work."""
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
    from tinkex.cli.doctor import machine_checks, server_checks

    yield from machine_checks.findings()
    yield from server_checks.findings()


def _lines(finding: Finding, width: int) -> str:
    head = f"{finding.status:4}  {finding.name:{_NAME_WIDTH}}"
    found = text(finding.found)
    lines = _wrap(found, width, head, " " * len(head))
    if any(len(line) > width for line in lines):
        # A long path gets a line of its own, so that the terminal does not break it.
        lines = [head.rstrip(), *_wrap(found, width, _INDENT, _INDENT)]
    if finding.todo:
        lines += _wrap(text(finding.todo), width, f"{_INDENT}-> ", f"{_INDENT}   ")
    return "\n".join(lines)


def _wrap(words: str, width: int, first: str, then: str) -> list[str]:
    """Lines broken at spaces only: paths and commands stay whole."""
    return textwrap.wrap(
        words,
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns
