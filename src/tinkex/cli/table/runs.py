"""Models, training runs and sessions of a server."""

from __future__ import annotations

from tinkex.cli.table.base import LIMIT, Argument, Command, Verbs

MODEL: Verbs = (
    "models to train and sample",
    {
        "list": Command(
            "models:list_all",
            "list the server's models",
            Argument("substring", nargs="?", metavar="SUBSTRING", help="only names with this"),
        ),
    },
)

RUN: Verbs = (
    "training runs",
    {
        "list": Command(
            "runs:list_all",
            "list training runs",
            LIMIT,
            Argument(
                "-c",
                "--columns",
                metavar="A,B",
                default="id,model,lora,updated,status",
                help="of id, model, owner, lora, updated, status, checkpoint, checkpoint_time "
                "(default: id,model,lora,updated,status)",
            ),
        ),
        "info": Command("runs:info", "show one training run", Argument("run_id", metavar="RUN_ID")),
    },
)

SESSION: Verbs = (
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
)
