"""`tinkex chat`: chat with one model, or with two at once.

Answers go to standard output, everything else to standard error. From a pipe each line is a
message, and an error ends the chat; on a terminal the error is printed and the chat continues.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.chat.text_columns import TextColumns, heading
from tinkex.cli.command_errors import CommandError, report
from tinkex.cli.commands import TEMPERATURE, TOP_P, Argument, whole_number
from tinkex.cli.output import harmless, say
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterator

    from tinkex.cli.chat.chat_session import ChatSession

ARGUMENTS = (
    Argument(
        "model MODEL",
        "a base model, a tinker:// path, or the folder of a training run "
        "(default: the server's only model)",
        nargs="?",
    ),
    Argument("--system TEXT", "the system message"),
    TEMPERATURE,
    TOP_P,
    Argument("--max-tokens N", "per answer", type=whole_number(1), default=512),
    Argument("--seed N", "makes answers reproducible", type=int),
)

_PROMPT = "> "
_HISTORY = ".tinkex_chat_history"
_MOST_LINES = 1000


def chat(args: argparse.Namespace) -> None:
    """Chat until the user leaves."""
    from tinkex.cli import target as targets
    from tinkex.cli.chat.chat_session import ChatSession, Leave
    from tinkex.cli.chat.speaker import ChatSampling, Speaker

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    sampling = ChatSampling(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    chosen = targets.find(args.model) if args.model else None
    with targets.connected(chosen) as (service, target):
        session = ChatSession(service, Speaker(service, target), sampling, args.system)
        if interactive:
            say(f"Chatting with {target.name}. /help lists commands, /quit leaves.")
        for line in _typed() if interactive else _piped():
            try:
                _take(line.strip(), session, args, interactive=interactive)
            except Leave:
                return


def _take(line: str, session: ChatSession, args: argparse.Namespace, *, interactive: bool) -> None:
    """Answer one line; on a terminal an error is printed and the chat continues."""
    try:
        if line.startswith("/") and not line.startswith("//"):
            say(session.command(line))
        elif line:
            _answer(session, line.removeprefix("/") if line.startswith("//") else line, args)
    except KeyboardInterrupt:
        if not interactive:
            raise
        say("\n(stopped)")
    except (TinkerError, CommandError, OSError) as error:
        if not interactive:
            raise
        report(error)


def _answer(session: ChatSession, question: str, args: argparse.Namespace) -> None:
    texts: list[str] = []
    if args.format == "json":
        for _ in session.answers(question, texts):
            pass
        told = [{"model": n, "text": t} for n, t in zip(session.names, texts, strict=True)]
        print(json.dumps({"message": question, "answers": told}, ensure_ascii=False), flush=True)
    elif len(session.pairs) == 1:
        for _, piece in session.answers(question, texts):
            print(harmless(piece or ""), end="", flush=True)
        print(flush=True)
    else:
        _side_by_side(session, question, texts)


def _side_by_side(session: ChatSession, question: str, texts: list[str]) -> None:
    width = shutil.get_terminal_size((80, 24)).columns
    left, right = session.names
    print("\n".join(heading(left, right, width)), flush=True)
    columns = TextColumns(width)
    for side, piece in session.answers(question, texts):
        rows = columns.end(side) if piece is None else columns.grow(side, harmless(piece))
        for row in rows:
            print(row, flush=True)


# -- input ---------------------------------------------------------------------------------------


def _typed() -> Iterator[str]:
    """Lines from a terminal, until Ctrl-D; Ctrl-C discards the line."""
    with _history(Path.home() / _HISTORY):
        while True:
            try:
                yield input(_PROMPT)
            except KeyboardInterrupt:
                print("\n/quit or Ctrl-D leaves.", file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return


def _piped() -> Iterator[str]:
    """Lines from a pipe or a file."""
    return (line.rstrip("\r\n") for line in sys.stdin)


@contextmanager
def _history(path: Path) -> Generator[None]:
    """Line editing with the history of earlier chats; without readline, neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        _write_history(readline, path)


def _write_history(readline: Any, path: Path) -> None:
    readline.set_history_length(_MOST_LINES)
    with suppress(OSError):  # a home folder that cannot be written to
        # Created first, with a mode that keeps other users from reading it.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        readline.write_history_file(path)
