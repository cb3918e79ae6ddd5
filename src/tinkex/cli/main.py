"""The program `tinkex`: parses the command line and runs the command.

Like `tinkex.cli.commands`, it imports nothing but argparse.
"""

from __future__ import annotations

import argparse
import sys

from tinkex._version import __version__
from tinkex.cli.commands import (
    DONE,
    FAILED,
    INTERRUPTED,
    MISUSED,
    NOUNS,
    PROGRAMS,
    program,
    verbs_of,
)
from tinkex.cli.parser import COMMAND, Parser

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from tinkex.cli.commands import Command

_WIDTH = 80
_FORMATS = ("table", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args, unknown = build_parser(words).parse_known_args(words)
        if unknown:
            args.parser.refuse(unknown)
        return _run(args)
    except SystemExit as leaving:  # argparse: after help, or after a misuse it has reported
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """The parser for `words`: only commands among them are complete. None: all commands are."""
    parser = _new_parser("tinkex", "Train and sample with Tinker-compatible servers.")
    parser.set_defaults(format="table")
    parser.add_argument("--version", action="version", version=f"tinkex {__version__}")
    nouns = parser.add_subparsers(title="commands", metavar=COMMAND, prog="tinkex")
    for noun, summary in NOUNS.items():
        if words is None or noun in words:
            below = nouns.add_parser(noun, help=summary, **_settings(summary))
            _add_verbs(below, noun, verbs_of(noun))
        else:
            nouns.add_parser(noun, help=summary, add_help=False)
    for name, summary in PROGRAMS.items():
        leaf = nouns.add_parser(name, help=summary, **_settings(summary))
        if words is None or name in words:
            _fill(leaf, program(name))
    summary = "print the version"
    version = nouns.add_parser("version", help=summary, **_settings(summary))
    _add_format(version)
    version.set_defaults(handler=_version)
    parser.set_defaults(handler=None, parser=parser)
    return parser


def _add_verbs(parser: argparse.ArgumentParser, noun: str, verbs: dict[str, Command]) -> None:
    _add_format(parser)
    parser.set_defaults(parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar=COMMAND, prog=f"tinkex {noun}")
    for verb, command in verbs.items():
        settings = _settings(command.description)
        _fill(subparsers.add_parser(verb, help=command.summary, **settings), command)


def _fill(leaf: argparse.ArgumentParser, command: Command) -> None:
    _add_format(leaf)
    leaf.set_defaults(handler=command.handler, parser=leaf)
    for argument in command.arguments:
        leaf.add_argument(*argument.names, **argument.settings)


def _settings(description: str) -> dict[str, Any]:
    text = description.rstrip(".")
    return {
        "description": f"{text[:1].upper()}{text[1:]}.",
        "formatter_class": _formatter,
        "allow_abbrev": False,
    }


def _new_parser(prog: str, summary: str) -> Parser:
    parser = Parser(prog, **_settings(summary))
    _add_format(parser)
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    # No default: the one of the subcommand would override `--format` before the command.
    parser.add_argument(
        "-f", "--format", choices=_FORMATS, default=argparse.SUPPRESS, help="the format of results"
    )


def _formatter(prog: str) -> argparse.HelpFormatter:
    # A fixed width: asking for the terminal's would import `shutil`.
    return argparse.HelpFormatter(prog, width=_WIDTH, max_help_position=28)


def _run(args: argparse.Namespace) -> int:
    if args.handler is None:
        args.parser.print_help(sys.stderr)
        return MISUSED
    try:
        status = args.handler(args)
        sys.stdout.flush()
        return DONE if status is None else status
    except BrokenPipeError:
        _forget_stdout()
        return FAILED
    except Exception as error:  # noqa: BLE001 - the program ends here with a message
        from tinkex.cli.command_errors import report

        return report(error)


def _version(args: argparse.Namespace) -> None:
    print(f'{{"version": "{__version__}"}}' if args.format == "json" else f"tinkex {__version__}")


def _forget_stdout() -> None:
    """The reader of standard output is gone; the interpreter must not fail to flush it at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
