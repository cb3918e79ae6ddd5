"""The table of commands: plain data, so that asking for help imports no handler."""

from __future__ import annotations

from tinkex.cli.table.account import AUTH, BILLING, KEY
from tinkex.cli.table.base import Argument, Command, Verbs
from tinkex.cli.table.checkpoints import CHECKPOINT
from tinkex.cli.table.runs import MODEL, RUN, SESSION
from tinkex.cli.table.serve import SERVE

__all__ = ["COMMANDS", "PROGRAMS", "Argument", "Command"]

COMMANDS: dict[str, Verbs] = {
    "auth": AUTH,
    "billing": BILLING,
    "checkpoint": CHECKPOINT,
    "key": KEY,
    "model": MODEL,
    "run": RUN,
    "session": SESSION,
}

# Commands of one word.
PROGRAMS: dict[str, Command] = {
    "serve": SERVE,
}
