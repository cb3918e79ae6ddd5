"""`tinkex model`: the models that the server can train and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import Argument, Command
from tinkex.cli.connect import service_client
from tinkex.cli.output import plain, show

if TYPE_CHECKING:
    import argparse


def list_all(args: argparse.Namespace) -> None:
    """List the server's models."""
    with service_client() as service:
        models = service.get_server_capabilities().supported_models
    if args.substring:
        wanted = args.substring.lower()
        models = [model for model in models if wanted in (model.model_name or "").lower()]
        if not models:
            raise CommandError(
                f"No model name contains {args.substring!r}",
                "`tinkex model list` shows every model of this server.",
            )
    show(
        args,
        {"models": [plain(model) for model in models]},
        ("Model", "Max Context", "Trainable", "Sampleable"),
        [
            (model.model_name, model.max_context_length, model.trainable, model.sampleable)
            for model in models
        ],
        empty="The server offers no models.",
    )


VERBS = {
    "list": Command(
        list_all,
        Argument("substring SUBSTRING", "only names that contain it", nargs="?"),
    ),
}
