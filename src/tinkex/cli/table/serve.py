"""Running a server."""

from __future__ import annotations

from tinkex.cli.table.base import Argument, Command

SERVE = Command(
    "serve:serve",
    "run a server",
    Argument(
        "--base-model",
        dest="base_models",
        action="append",
        metavar="NAME[=FOLDER]",
        help="a model to serve; may be given again (default: HuggingFaceTB/SmolLM2-135M-Instruct)",
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
)
