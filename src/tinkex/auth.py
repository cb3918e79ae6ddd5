"""Checks of credentials before a program starts; none of them opens a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.clock import time_limit
from tinkex.config import Config
from tinkex.credentials import credentials_path, read_store
from tinkex.errors import APITimeoutError, CredentialError, TinkerError

if TYPE_CHECKING:
    from tinkex.clients.connection import Connection

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The key in TINKER_API_KEY, else the stored default key; None when there is no good one.

    A configured credential command is not run.
    """
    from tinkex.transport.auth import is_well_formed

    try:
        key = Config.load().api_key or read_store(credentials_path(Path.home())).default_key
    except TinkerError:
        return None
    return key if key and is_well_formed(key) else None


def tinker_has_credentials() -> bool:
    """Whether a credential or a command that prints one is configured; nothing is tried."""
    from tinkex.transport.auth import choose

    try:
        choose(Config.load())
    except TinkerError:
        return False
    return True


def raise_if_tinker_not_accessible(timeout: float = 10.0) -> None:
    """Return when the server accepts the credential; raise a TinkerError that names the cause.

    Asks the server once what it offers, and takes `timeout` seconds at most.
    """
    from tinkex.clients.connection import Connection
    from tinkex.transport.auth import choose

    config = _impatient(timeout)
    choose(config)
    connection = Connection(config)
    try:
        connection.operations.block(lambda: _ask(connection, timeout))
    finally:
        connection.close()


def _impatient(timeout: float) -> Config:
    try:
        config = Config.load()
    except OSError as error:
        raise CredentialError(f"the stored credentials cannot be read: {error}") from error
    # Half of the time goes to connecting, so that a failure has a cause before time is up.
    half_s = timeout / 2
    return replace(
        config,
        connect_timeout_s=min(config.connect_timeout_s, half_s),
        bootstrap_deadline_s=half_s,
        submit_deadline_s=half_s,
        telemetry=False,
    )


async def _ask(connection: Connection, timeout: float) -> None:
    from tinkex.wire import routes

    async with time_limit(connection.clock, timeout) as limit:
        api = await connection.connected()
        # Not `call`: with an account that cannot pay, that would wait for it to recover.
        reply = await api.send(routes.GET_SERVER_CAPABILITIES, None)
        api.raise_for(reply, routes.GET_SERVER_CAPABILITIES)
    if limit.expired:
        url = connection.config.base_url
        raise APITimeoutError(message=f"{url} did not answer within {timeout:g} s")
