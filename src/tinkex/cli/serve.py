"""`tinkex serve`: a server in the foreground."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.failures import CommandError, misuse
from tinkex.config import server_environment
from tinkex.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    import argparse

    from tinkex.serving.host_settings import HostSettings

_FLAGS = (
    "host",
    "port",
    "data_dir",
    "database",
    "artifacts",
    "base_models",
    "device",
    "dtype",
    "threads",
    "log_level",
    "log_format",
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
    mode = "single" if settings.auth == "none" else "stored"
    with listen(settings.host, settings.port) as listener:
        host = Host(
            settings,
            replace(settings.server, key_mode=mode),
            listener,
            on_ready=lambda: _say_ready(args, settings, url_of(listener)),
        )
        try:
            run_host(host, settings.data_dir)
        except InputError as error:
            # The settings were fine by themselves; what they name is not.
            raise CommandError(f"the server cannot start: {error}") from error


def _say_ready(args: argparse.Namespace, settings: HostSettings, url: str) -> None:
    from tinkex.serving.host_settings import base_models

    names = [name for name, _ in base_models(settings)]
    if args.format == "json":
        print(json.dumps({"url": url, "models": names}), flush=True)
    else:
        print(f"tinkex serves {', '.join(names)} on {url}", flush=True)


def _settings(args: argparse.Namespace) -> HostSettings:
    from tinkex.serving.host_settings import load_settings

    given: dict[str, Any] = {
        name: value for name in _FLAGS if (value := getattr(args, name)) is not None
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
