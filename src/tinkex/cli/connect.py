"""The clients that commands use.

A person waits at the other end, so commands are less patient than programs: an unreachable
server is given up after half a minute, and said to be unreachable at once.

With nothing configured commands run on the embedded server. Theirs keeps what it has in the folder
that `tinkex serve` would use, so that one command finds what another has made.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.cli.log_output import show_log
from tinkex.clients.admin import AdminClient
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient
from tinkex.clients.session import Session
from tinkex.config import DATA_DIR, EMBEDDED, Config
from tinkex.transport.auth import choose

if TYPE_CHECKING:
    from collections.abc import Generator

_PATIENCE_S = 30.0


@contextmanager
def service_client(model: str | None = None, *, embedded: bool = False) -> Generator[ServiceClient]:
    """A service client with the caller's settings; without a usable key nothing is sent.

    `model` is a base model that an embedded server must have besides its usual ones: a name on the
    hub, or `NAME=FOLDER`. With `embedded` that server is used whatever is configured.
    """
    config = load_config(base_url=EMBEDDED if embedded else None)
    if config.embedded:
        config = _at_home(config, model)
    else:
        choose(config)
    with ServiceClient.over(Session(config, project_id=config.project_id)) as client:
        yield client


@contextmanager
def rest_client() -> Generator[RestClient]:
    """A REST client with the caller's settings."""
    with service_client() as service:
        yield RestClient(service.holder)


@contextmanager
def admin_client() -> Generator[AdminClient]:
    """An admin client with the caller's settings."""
    with service_client() as service:
        yield AdminClient(service.holder)


def load_config(
    api_key: str | None = None, base_url: str | None = None, *, log_level: int = logging.WARNING
) -> Config:
    """The caller's settings; warnings go to standard error from here on."""
    config = Config.load(api_key=api_key, base_url=base_url)
    show_log(config.log_level or log_level)
    # No telemetry: a command is not a training program.
    return replace(
        config, bootstrap_deadline_s=_PATIENCE_S, submit_deadline_s=_PATIENCE_S, telemetry=False
    )


def _at_home(config: Config, model: str | None) -> Config:
    from tinkex.embedded import DEFAULT_MODELS

    models = dict.fromkeys(
        (*(config.embedded_models or DEFAULT_MODELS), *([model] if model else ()))
    )
    return replace(
        config,
        data_dir=config.data_dir or DATA_DIR,
        embedded_models=tuple(models),
        # Loading torch and a model takes longer than asking a server.
        bootstrap_deadline_s=Config().bootstrap_deadline_s,
        submit_deadline_s=Config().submit_deadline_s,
    )
