"""The list of commands, and how a command's module declares its arguments.

Help must cost little more than starting Python, so this module imports nothing but argparse, and
the module of a command is imported when the command is typed: `tinkex.cli.run` has the verbs of
`tinkex run` as VERBS, `tinkex.cli.chat` the arguments of `tinkex chat` as ARGUMENTS. Such a module
imports clients, wire types and numpy inside its handlers only.
"""

from __future__ import annotations

import argparse
import math

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Handler = Callable[[argparse.Namespace], int | None]

# Exit statuses.
DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

# Commands of two words, such as `tinkex run list`.
NOUNS = {
    "auth": "sign in and out, and see which account is in use",
    "billing": "usage of tokens and storage",
    "checkpoint": "list, share, download, export, import and delete checkpoints",
    "cluster": "many nodes behind one address",
    "data": "view and check training data",
    "key": "the API keys of your own server",
    "model": "models to train and sample",
    "run": "training runs",
    "session": "sessions: usage and traces",
    "train": "fine-tune a model with a ready-made loop",
}

# Commands of one word.
PROGRAMS = {
    "audit": "what changed on your own server, and by whom",
    "chat": "chat with a model or a checkpoint",
    "demo": "fine-tune a small model on this machine and compare its answers",
    "doctor": "check the installation, the settings and the server",
    "sample": "sample answers to prompts from a file or the command line",
    "serve": "run a server",
}


class Argument:
    """The parameters of one `add_argument` call.

    `spec` is the argument as help shows it: the names of an option and its metavar, or the name of
    a positional argument and its metavar. An option without a metavar is a flag. A default value
    is added to the help text.
    """

    def __init__(self, spec: str, text: str | None = None, **settings: Any) -> None:
        *names, last = spec.split()
        if names and not last.startswith("-"):
            settings["metavar"] = last
        else:
            names.append(last)
            settings.setdefault("action", "store_true")
        default = settings.get("default")
        if default:
            shown = f"{default:g}" if isinstance(default, float) else default
            text = f"{text} (default: {shown})"
        self.names = names
        self.settings: dict[str, Any] = {**settings, "help": text}


class Command:
    """One command: its handler, a line of help, and its arguments.

    The handler takes the parsed arguments and returns the exit status; None means 0. Its docstring
    is the description of the command, the first sentence is the line of help.
    """

    def __init__(self, handler: Handler, *arguments: Argument) -> None:
        self.handler = handler
        self.description = " ".join((handler.__doc__ or "").split())
        first = self.description.partition(". ")[0].rstrip(".")
        self.summary = first[:1].lower() + first[1:]
        self.arguments = arguments


def verbs_of(noun: str) -> dict[str, Command]:
    """The commands of a noun, by their verbs."""
    return _module(noun).VERBS


def program(name: str) -> Command:
    """A command of one word."""
    module = _module(name)
    command = Command(getattr(module, name), *module.ARGUMENTS)
    command.summary = PROGRAMS[name]
    return command


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(f"tinkex.cli.{name}")


# -- arguments -----------------------------------------------------------------------------------


def whole_number(least: int) -> Callable[[str], int]:
    """An argument type: a whole number, `least` or more."""

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
    """An argument type: a finite number that `fits`; `what` describes those numbers."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            raise argparse.ArgumentTypeError(f"must be a number {what}, not {text!r}")
        return number

    return read


PATH = Argument("path PATH", "a checkpoint, such as tinker://RUN/weights/NAME")
PATH_OR_RUN = Argument(
    "path PATH", "a checkpoint (tinker://RUN/weights/NAME), or the folder of a training run"
)
FORCE = Argument("--force", "replace the folder if it exists")
LIMIT = Argument("--limit N", "show at most N; 0 shows all", type=whole_number(0), default=20)
TEMPERATURE = Argument(
    "--temperature T",
    "sampling temperature; 0 is greedy",
    type=real_number(lambda number: number >= 0, "of 0 or more"),
    default=0.7,
)
TOP_P = Argument(
    "--top-p P",
    "nucleus sampling: the probability mass to sample from",
    type=real_number(lambda number: 0 < number <= 1, "above 0 and at most 1"),
    default=1.0,
)
