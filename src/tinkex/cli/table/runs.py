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
                help="of id, model, owner, lora, updated, status, checkpoint, checkpoint_time, "
                "folder (default: id,model,lora,updated,status)",
            ),
        ),
        "info": Command("runs:info", "show one training run", Argument("run_id", metavar="RUN_ID")),
        "watch": Command(
            "watch:watch",
            "follow a run as it goes",
            Argument("run", metavar="RUN", help="a run's folder, or its id on the server"),
            Argument("--once", action="store_true", help="show what there is now, and leave"),
        ),
        "plot": Command(
            "plot:plot",
            "plot a run here, or draw a picture of it",
            Argument(
                "folders", nargs="+", metavar="FOLDER", help="a run's folder; several overlay"
            ),
            Argument(
                "-m",
                "--metric",
                dest="metrics",
                action="append",
                metavar="NAME",
                help="such as loss or reward; may be given again (default: what the run is for)",
            ),
            Argument(
                "-o", "--output", metavar="FILE", help="a picture instead: FILE.svg or FILE.png"
            ),
        ),
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
