"""The clients that commands use.

A person waits at the other end, so commands are less patient than programs: an unreachable
server is given up after half a minute, and said to be unreachable at once.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.clients.admin import AdminClient
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient
from tinkex.clients.session import Session
from tinkex.config import Config
from tinkex.transport.auth import choose

if TYPE_CHECKING:
    from collections.abc import Generator

_PATIENCE_S = 30.0


@contextmanager
def service_client() -> Generator[ServiceClient]:
    """A service client with the caller's settings; without a key nothing is sent."""
    config = load_config()
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


def load_config(api_key: str | None = None) -> Config:
    """The caller's settings; warnings go to standard error from here on."""
    config = Config.load(api_key=api_key)
    level = config.log_level or logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s: %(message)s")
    # No telemetry: a command is not a training program.
    return replace(
        config, bootstrap_deadline_s=_PATIENCE_S, submit_deadline_s=_PATIENCE_S, telemetry=False
    )
