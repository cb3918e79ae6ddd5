"""The table of commands, and running one of them.

Asking for help must cost little more than starting Python, so this module imports nothing but
argparse: the table is plain data, and a handler's module is imported when its command runs.
A handler takes the parsed arguments and returns an exit status; None means 0.
"""

from __future__ import annotations

import argparse
import sys

from tinkex._version import __version__

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_WIDTH = 80
_FORMATS = ("table", "json")


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


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"must not be negative: {text}")
    return count


_PATH = Argument("path", metavar="PATH", help="a checkpoint, such as tinker://RUN/weights/NAME")
_LIMIT = Argument(
    "--limit",
    type=_count,
    default=20,
    metavar="N",
    help="how many at most; 0 for all (default: 20)",
)
_SERVER = (
    Argument("--data-dir", metavar="DIR", help="the server's folder (default: ./tinkex-data)"),
    Argument("--database", metavar="URL", help="its database, if that is not in the folder"),
)
_CSV = Argument("--csv", metavar="FILE", help="write CSV to FILE instead; - is standard output")

COMMANDS: dict[str, tuple[str, dict[str, Command]]] = {
    "auth": (
        "sign in and out, see who you are",
        {
            "login": Command("auth:login", "store an API key as the default"),
            "logout": Command("auth:logout", "forget the stored default key"),
            "status": Command("auth:status", "check the credential and the server"),
            "whoami": Command("auth:whoami", "show whose credential it is"),
        },
    ),
    "billing": (
        "usage of tokens and storage",
        {
            "usage": Command(
                "billing:usage",
                "show usage by the hour",
                Argument("starting_on", metavar="STARTING_ON", help="a full UTC hour, included"),
                Argument(
                    "ending_before",
                    metavar="ENDING_BEFORE",
                    help="a full UTC hour, excluded; at most 14 days later",
                ),
                _CSV,
                Argument(
                    "--sessions-csv",
                    metavar="FILE",
                    help="write the sessions' metadata as CSV to FILE",
                ),
            ),
            "checkpoint-storage": Command(
                "billing:checkpoint_storage",
                "show what the stored checkpoints take up",
                Argument("--project-id", metavar="ID", help="only this project"),
                _CSV,
            ),
        },
    ),
    "checkpoint": (
        "list, share, download and delete checkpoints",
        {
            "list": Command(
                "checkpoints:list_all",
                "list checkpoints, newest first",
                Argument("--run-id", metavar="ID", help="only, and all, of this training run"),
                _LIMIT,
            ),
            "info": Command("checkpoints:info", "show one checkpoint", _PATH),
            "publish": Command("checkpoints:publish", "let everybody use a checkpoint", _PATH),
            "unpublish": Command("checkpoints:unpublish", "make a checkpoint private", _PATH),
            "set-ttl": Command(
                "checkpoints:set_ttl",
                "set when a checkpoint expires",
                _PATH,
                Argument("--ttl", type=int, metavar="SECONDS", help="expire so long from now"),
                Argument("--remove", action="store_true", help="keep it for ever"),
            ),
            "delete": Command(
                "deletion:delete",
                "delete checkpoints for good",
                Argument("paths", nargs="*", metavar="PATH", help="checkpoints to delete"),
                Argument("--run-id", metavar="ID", help="delete those of this training run"),
                Argument(
                    "--type",
                    dest="kind",
                    choices=(
                        "weights",
                        "sampler_weights",
                        "external_weights",
                        "training",
                        "sampler",
                        "external",
                    ),
                    metavar="KIND",
                    help="with --run-id: only weights, sampler_weights or external_weights",
                ),
                Argument("--before", metavar="DATE", help="with --run-id: only older (ISO, UTC)"),
                Argument("--after", metavar="DATE", help="with --run-id: only newer (ISO, UTC)"),
                Argument("-y", "--yes", action="store_true", help="do not ask"),
            ),
            "download": Command(
                "download:download",
                "download a checkpoint's files",
                _PATH,
                Argument("-o", "--output", metavar="DIR", help="where the folder is made"),
                Argument("--force", action="store_true", help="replace the folder if it exists"),
            ),
            "push-hf": Command(
                "hub:push",
                "upload an adapter to the Hugging Face hub",
                _PATH,
                Argument("-r", "--repo", metavar="ID", help="repository; derived if not given"),
                Argument("--public", action="store_true", help="make the repository public"),
                Argument("--revision", metavar="R", help="branch to upload to"),
                Argument("--commit-message", metavar="M", help="message of the commit"),
                Argument("--create-pr", action="store_true", help="open a pull request"),
                Argument(
                    "--allow-pattern", action="append", metavar="P", help="upload only these files"
                ),
                Argument(
                    "--ignore-pattern", action="append", metavar="P", help="leave out these files"
                ),
                Argument("--no-model-card", action="store_true", help="write no README.md"),
            ),
        },
    ),
    "key": (
        "the keys of your own server",
        {
            "create": Command(
                "keys:create",
                "make a key and print it, this once",
                Argument("--owner", metavar="NAME", help="whose key it is (default: a new tenant)"),
                Argument("--name", default="", metavar="TEXT", help="what to call it"),
                Argument("--note", default="", metavar="TEXT", help="anything worth remembering"),
                *_SERVER,
            ),
            "list": Command(
                "keys:list_all",
                "list keys; the keys themselves are not kept",
                Argument("--owner", metavar="NAME", help="only this tenant's"),
                *_SERVER,
            ),
            "revoke": Command(
                "keys:revoke",
                "let a key in no more",
                Argument("key_id", type=int, metavar="ID", help="as in `tinkex key list`"),
                *_SERVER,
            ),
        },
    ),
    "model": (
        "models to train and sample",
        {
            "list": Command(
                "models:list_all",
                "list the server's models",
                Argument("substring", nargs="?", metavar="SUBSTRING", help="only names with this"),
            ),
        },
    ),
    "run": (
        "training runs",
        {
            "list": Command(
                "runs:list_all",
                "list training runs",
                _LIMIT,
                Argument(
                    "-c",
                    "--columns",
                    metavar="A,B",
                    default="id,model,lora,updated,status",
                    help="of id, model, owner, lora, updated, status, checkpoint, checkpoint_time "
                    "(default: id,model,lora,updated,status)",
                ),
            ),
            "info": Command(
                "runs:info", "show one training run", Argument("run_id", metavar="RUN_ID")
            ),
        },
    ),
    "session": (
        "sessions: usage and traces",
        {
            "usage": Command(
                "sessions:usage",
                "show a session's token totals",
                Argument("session_id", metavar="SESSION_ID"),
                Argument(
                    "--since",
                    metavar="DATE",
                    help="count from this UTC hour on (default: 14 days ago)",
                ),
            ),
            "export-trace": Command(
                "sessions:export_trace",
                "save a trace that Perfetto reads",
                Argument("session_id", metavar="SESSION_ID"),
                Argument("-o", "--output", metavar="FILE", help="default: SESSION_ID.pftrace"),
                Argument("--url-only", action="store_true", help="print a link, save nothing"),
            ),
        },
    ),
}

# Commands of one word.
PROGRAMS: dict[str, Command] = {
    "serve": Command(
        "serve:serve",
        "run a server",
        Argument(
            "--base-model",
            dest="base_models",
            action="append",
            metavar="NAME[=FOLDER]",
            help="a model to serve; may be given again (default: "
            "HuggingFaceTB/SmolLM2-135M-Instruct)",
        ),
        Argument("--host", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)"),
        Argument("--port", metavar="N", help="0 for any that is free (default: 8000)"),
        Argument("--data-dir", metavar="DIR", help="what is kept (default: ./tinkex-data)"),
        Argument("--database", metavar="URL", help="postgresql://… instead of a file in DIR"),
        Argument("--artifacts", metavar="URL", help="adapters go to s3://… instead of to DIR"),
        Argument(
            "--no-auth", action="store_true", help="any key is the one tenant; on this machine only"
        ),
        Argument("--config", metavar="FILE", help="settings (default: DIR/tinkex.toml, if any)"),
        Argument("--device", metavar="NAME", help="such as cpu or cuda (default: cuda if any)"),
        Argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16"),
        Argument("--threads", metavar="N", help="threads of one computation on the CPU"),
        Argument("--log-level", metavar="LEVEL", help="debug, info, warning or error"),
        Argument("--log-format", metavar="FORMAT", help="text or json"),
        Argument("--set", action="append", metavar="NAME=VALUE", help="any other setting"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 failed, 2 misused, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(words).parse_args(words)
        return _run(args)
    except SystemExit as leaving:  # argparse: after help, or after a misuse it has reported
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser for `words`: only the nouns among them get their verbs. None: all of them."""
    parser = _new_parser("tinkex", "Train and sample with Tinker-compatible servers.")
    parser.set_defaults(format="table")
    parser.add_argument("--version", action="version", version=f"tinkex {__version__}")
    nouns = parser.add_subparsers(title="commands", metavar="COMMAND", prog="tinkex")
    for noun, (summary, verbs) in COMMANDS.items():
        if words is None or noun in words:
            _add_verbs(nouns.add_parser(noun, help=summary, **_settings(summary)), noun, verbs)
        else:
            nouns.add_parser(noun, help=summary, add_help=False)
    for name, command in PROGRAMS.items():
        leaf = nouns.add_parser(name, help=command.summary, **_settings(command.summary))
        if words is None or name in words:
            _fill(leaf, command)
    summary = "print the version"
    version = nouns.add_parser("version", help=summary, **_settings(summary))
    _add_format(version)
    version.set_defaults(handler="version")
    parser.set_defaults(handler=None, parser=parser)
    return parser


def _add_verbs(parser: argparse.ArgumentParser, noun: str, verbs: dict[str, Command]) -> None:
    _add_format(parser)
    parser.set_defaults(parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", prog=f"tinkex {noun}")
    for verb, command in verbs.items():
        _fill(
            subparsers.add_parser(verb, help=command.summary, **_settings(command.summary)), command
        )


def _fill(leaf: argparse.ArgumentParser, command: Command) -> None:
    _add_format(leaf)
    leaf.set_defaults(handler=command.handler, parser=leaf)
    for argument in command.arguments:
        leaf.add_argument(*argument.names, **argument.settings)


def _settings(summary: str) -> dict[str, Any]:
    return {
        "description": f"{summary[0].upper()}{summary[1:]}.",
        "formatter_class": _formatter,
        "allow_abbrev": False,
    }


def _new_parser(prog: str, summary: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, **_settings(summary.rstrip(".")))
    _add_format(parser)
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    # Suppressed, so that a word after the command does not undo one before it.
    parser.add_argument(
        "-f", "--format", choices=_FORMATS, default=argparse.SUPPRESS, help="how to print results"
    )


def _formatter(prog: str) -> argparse.HelpFormatter:
    # A width of its own: asking for the terminal's would import half of `shutil`.
    return argparse.HelpFormatter(prog, width=_WIDTH, max_help_position=28)


def _run(args: argparse.Namespace) -> int:
    if args.handler is None:
        args.parser.print_help(sys.stderr)
        return MISUSED
    if args.handler == "version":
        print(
            f'{{"version": "{__version__}"}}' if args.format == "json" else f"tinkex {__version__}"
        )
        return DONE
    try:
        status = _load(args.handler)(args)
        sys.stdout.flush()
        return DONE if status is None else status
    except BrokenPipeError:
        _forget_stdout()
        return FAILED
    except Exception as error:  # noqa: BLE001 - the program ends here, and says why
        from tinkex.cli.failures import report

        return report(error)


def _load(handler: str) -> Callable[[argparse.Namespace], int | None]:
    import importlib

    module, _, name = handler.partition(":")
    run: Callable[[argparse.Namespace], int | None] = getattr(
        importlib.import_module(f"tinkex.cli.{module}"), name
    )
    return run


def _forget_stdout() -> None:
    """Whoever read our output has gone; the interpreter must not complain about it at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
