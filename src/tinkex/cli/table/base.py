"""What a command is in the table: its handler, a line of help and its arguments."""

from __future__ import annotations

import argparse
import math

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from collections.abc import Callable
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


def whole_number(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, {least} or more, not {text!r}"
            )
        return number

    return read


def real_number(fits: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Reads a number that `fits`; `what` says which do."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            raise argparse.ArgumentTypeError(f"must be a number {what}, not {text!r}")
        return number

    return read


PATH = Argument("path", metavar="PATH", help="a checkpoint, such as tinker://RUN/weights/NAME")
MADE = Argument(
    "path",
    metavar="PATH",
    help="a checkpoint (tinker://RUN/weights/NAME), or the folder of a training run",
)
LIMIT = Argument(
    "--limit",
    type=whole_number(0),
    default=20,
    metavar="N",
    help="how many at most; 0 for all (default: 20)",
)
