"""What a command is in the table: its handler, a line of help and its arguments."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from typing import Any


class Argument:
    """What `add_argument` is called with."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


class Command:
    """One verb: `module:function` below `tinkex.cli`, a line of help, and its arguments."""

    def __init__(self, handler: str, summary: str, *arguments: Argument) -> None:
        self.handler = handler
        self.summary = summary
        self.arguments = arguments


Verbs = tuple[str, dict[str, Command]]
"""What stands under a noun: a line about it, and its commands by their verbs."""


def count(text: str) -> int:
    """A number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative: {text}")
    return number


PATH = Argument("path", metavar="PATH", help="a checkpoint, such as tinker://RUN/weights/NAME")
MADE = Argument(
    "path",
    metavar="PATH",
    help="a checkpoint (tinker://RUN/weights/NAME), or the folder of a training run",
)
LIMIT = Argument(
    "--limit",
    type=count,
    default=20,
    metavar="N",
    help="how many at most; 0 for all (default: 20)",
)
