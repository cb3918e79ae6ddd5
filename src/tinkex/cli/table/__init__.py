"""The table of commands: plain data, so that asking for help imports no handler."""

from __future__ import annotations

from tinkex.cli.table.account import AUTH, BILLING, KEY
from tinkex.cli.table.base import Argument, Command, Verbs
from tinkex.cli.table.checkpoints import CHECKPOINT
from tinkex.cli.table.data import DATA
from tinkex.cli.table.runs import MODEL, RUN, SESSION
from tinkex.cli.table.serve import SERVE
from tinkex.cli.table.talk import CHAT, DEMO, DOCTOR, SAMPLE
from tinkex.cli.table.train import TRAIN

__all__ = ["COMMANDS", "PROGRAMS", "Argument", "Command"]

COMMANDS: dict[str, Verbs] = {
    "auth": AUTH,
    "billing": BILLING,
    "checkpoint": CHECKPOINT,
    "data": DATA,
    "key": KEY,
    "model": MODEL,
    "run": RUN,
    "session": SESSION,
    "train": TRAIN,
}

# Commands of one word.
PROGRAMS: dict[str, Command] = {
    "chat": CHAT,
    "demo": DEMO,
    "doctor": DOCTOR,
    "sample": SAMPLE,
    "serve": SERVE,
}
