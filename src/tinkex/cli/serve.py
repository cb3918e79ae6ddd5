"""`tinkex serve`: a server in the foreground."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument
from tinkex.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    import argparse

    from tinkex.serving.host_settings import HostSettings

# Each of these is a setting; `_settings` reads the others.
_SETTINGS = (
    Argument(
        "--base-model NAME[=FOLDER]",
        "a model to serve; may be repeated (default: HuggingFaceTB/SmolLM2-135M-Instruct)",
        dest="base_models",
        action="append",
    ),
    Argument("--host ADDRESS", "the address to listen on (default: 127.0.0.1)"),
    Argument("--port N", "0 for any free port (default: 8000)"),
    Argument("--data-dir DIR", "the server's data (default: ./tinkex-data)"),
    Argument("--database URL", "postgresql://… instead of a file in DIR"),
    Argument("--artifacts URL", "store adapters in s3://… instead of DIR"),
    Argument("--device NAME", "such as cpu or cuda (default: cuda if available)"),
    Argument("--dtype NAME", "float32, bfloat16 or float16"),
    Argument("--threads N", "threads of one computation on the CPU"),
    Argument("--tls-cert FILE", "serve https:// with this certificate (PEM, with its chain)"),
    Argument("--tls-key FILE", "the certificate's key; both files are watched for changes"),
    Argument("--join NAME", "be a node of this cluster; needs --database and --artifacts"),
    Argument("--role ROLE", "full, or api for a node without an engine"),
    Argument("--node-name NAME", "how operators name this node"),
    Argument("--node-url URL", "where other nodes reach this one (default: where it listens)"),
    Argument("--log-level LEVEL", "debug, info, warning or error"),
    Argument("--log-format FORMAT", "text or json"),
)

ARGUMENTS = (
    *_SETTINGS,
    Argument("--no-auth", "accept any key, all as one tenant; for this machine only"),
    Argument("--config FILE", "settings (default: DIR/tinkex.toml, if it exists)"),
    Argument("--set NAME=VALUE", "any other setting", action="append"),
)


def serve(args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    try:
        from tinkex.server.observability.logs import install
        from tinkex.serving.data_dir import listen, url_of
        from tinkex.serving.process import Host, run_host
    except ModuleNotFoundError as error:
        needs = f"a server needs {error.name}"
        raise MissingPackageError(needs, "'tinkex[server,engine]'") from error
    settings = _settings(args)
    install(settings.log_format, level=getattr(logging, settings.log_level.upper()))
    settings.tls()  # refused before anything is started
    mode = "single" if settings.auth == "none" else "stored"
    with listen(settings.host, settings.port) as listener:
        url = url_of(listener, settings.scheme)
        if settings.join is not None:
            settings = _named(settings, url)
        host = Host(
            settings,
            replace(settings.server, key_mode=mode),
            listener,
            on_ready=lambda: _say_ready(args, settings, url),
        )
        try:
            run_host(host, settings.data_dir)
        except InputError as error:
            # The settings are valid, but a model or folder that they name is not.
            raise CommandError(f"the server cannot start: {error}") from error


def _named(settings: HostSettings, url: str) -> HostSettings:
    """A node's settings with its name and its address for others."""
    machine, port = socket.gethostname(), urlsplit(url).port
    if settings.host in ("0.0.0.0", "::"):
        url = f"{settings.scheme}://{machine}:{port}"
    return replace(
        settings,
        node_name=settings.node_name or f"{machine}-{port}",
        node_url=settings.node_url or url,
    )


def _say_ready(args: argparse.Namespace, settings: HostSettings, url: str) -> None:
    from tinkex.serving.host_settings import base_models

    names = [name for name, _ in base_models(settings)] if settings.role == "full" else []
    if args.format == "json":
        print(json.dumps({"url": url, "models": names}), flush=True)
    else:
        what = ", ".join(names) or "other nodes' models"
        print(f"tinkex serves {what} on {url}", flush=True)


def _settings(args: argparse.Namespace) -> HostSettings:
    from tinkex.config import server_environment
    from tinkex.serving.host_settings import load_settings

    names = [argument.settings.get("dest", argument.names[0][2:]) for argument in _SETTINGS]
    flags = [name.replace("-", "_") for name in names]
    given: dict[str, Any] = {
        name: value for name in flags if (value := getattr(args, name)) is not None
    }
    if args.no_auth:
        given["auth"] = "none"
    for text in args.set or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise misuse(f"--set takes NAME=VALUE, not {text!r}")
        given[name] = value
    config = None if args.config is None else Path(args.config)
    return load_settings(given, server_environment(), config=config)
