"""`tinkex chat`: talk to a model, or to two at once.

Answers go to standard output, the talk around them to standard error. From a pipe each line is a
message, and a failure ends the chat; a person is told about it and goes on.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from tinkex.cli import target as targets
from tinkex.cli.failures import CommandError, report
from tinkex.cli.output import harmless, say
from tinkex.cli.talking import lines
from tinkex.cli.talking.columns import Columns, heading
from tinkex.cli.talking.session import ChatSession, Leave
from tinkex.cli.talking.speaker import Manner, Speaker
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    import argparse


def chat(args: argparse.Namespace) -> None:
    """Chat until the person leaves."""
    interactive = lines.is_interactive()
    manner = Manner(args.temperature, args.top_p, args.max_tokens, args.seed)
    chosen = targets.find(args.model) if args.model else None
    with targets.connected(chosen) as (service, target):
        session = ChatSession(service, Speaker(service, target), manner, args.system)
        if interactive:
            say(f"You talk to {target.name}. /help lists commands, /quit leaves.")
        for line in lines.typed() if interactive else lines.piped():
            try:
                _take(line.strip(), session, args, interactive=interactive)
            except Leave:
                return


def _take(line: str, session: ChatSession, args: argparse.Namespace, *, interactive: bool) -> None:
    """Answer one line; a person who is there is told what went wrong, and goes on."""
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
    columns = Columns(width)
    for side, piece in session.answers(question, texts):
        rows = columns.end(side) if piece is None else columns.grow(side, harmless(piece))
        for row in rows:
            print(row, flush=True)
