"""Checks of the settings, the credential and the server."""

from __future__ import annotations

import fcntl
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.cli.command_errors import describe, next_step
from tinkex.cli.connect import load_config
from tinkex.cli.doctor.machine_checks import Finding
from tinkex.clients.connection import Connection
from tinkex.config import DATA_DIR, DEFAULT_BASE_URL, server_environment
from tinkex.credentials import credentials_path
from tinkex.errors import APIError, MissingPackageError, ProxyError, TinkerError
from tinkex.transport.auth import choose
from tinkex.wire import routes
from tinkex.wire.routes import Pool, Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.config import Config
    from tinkex.transport.api import Api

_PATIENCE_S = 8.0
_START_S = 120.0
_ROUNDS = 3
_SHOWN_MODELS = 3
_START = "`tinkex serve` starts a server on this machine."
_DESCRIPTION: Route[None, None] = Route(
    "openapi", "GET", "/openapi.json", None, None, Pool.REST, retry="none", request_encoding="none"
)


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The models and version of a server, and its latency."""

    models: list[str]
    latency_s: float
    version: str | None


def findings() -> Iterator[Finding]:
    """Which server commands and programs would use, and whether they can reach it."""
    try:
        # Errors only: a warning would repeat a finding.
        config = load_config(log_level=logging.ERROR)
    except (TinkerError, OSError) as error:
        yield Finding("settings", "fail", describe(error), "Correct or unset it.")
        return
    yield settings(config)
    yield from own_server_settings(config)
    credential = credential_of(config)
    yield credential
    if credential.status == "ok":
        yield embedded_server(config) if config.embedded else server(config)


def settings(config: Config) -> Finding:
    """The server that the settings name, and the other settings; never a secret."""
    if config.embedded:
        where = "commands start an embedded server on this machine"
    elif config.base_url == DEFAULT_BASE_URL:
        where = f"hosted Tinker at {config.base_url}"
    else:
        where = f"the server at {config.base_url}"
    given = [
        f"{name} {value}"
        for name, value in (
            ("proxy", config.server_proxy),
            ("project", config.project_id),
            ("tags", ", ".join(config.tags)),
            ("extra headers", ", ".join(config.headers)),
            ("data in", config.data_dir),
        )
        if value
    ]
    return Finding("settings", "ok", "; ".join((where, *given)))


def own_server_settings(config: Config) -> Iterator[Finding]:
    """The settings of a server here, from the environment and its file, by name only."""
    folder = config.data_dir or DATA_DIR
    names = sorted(server_environment())
    file = folder / "tinkex.toml"
    if not names and not file.is_file():
        return
    sources = [f"TINKEX_{name.upper()}" for name in names] + [str(file)] * file.is_file()
    found = f"of a server here: {', '.join(sources)}"
    try:
        from tinkex.serving.host_settings import load_settings

        load_settings({}, server_environment())
    except ModuleNotFoundError:
        yield Finding("serving", "warn", found, "pip install 'tinkex[server,engine]'")
    except TinkerError as error:
        yield Finding("serving", "fail", describe(error), "Correct or unset it.")
    else:
        yield Finding("serving", "ok", found)


def credential_of(config: Config) -> Finding:
    """Whether there is a credential and where it comes from; it is not shown."""
    if config.embedded:
        return Finding("credential", "ok", "none; the embedded server needs none")
    try:
        source = choose(config)
    except TinkerError as error:
        return Finding("credential", "fail", describe(error), next_step(error))
    if source.kind == "command":
        place = "from the command in TINKER_CREDENTIAL_CMD"
    elif config.api_key:
        place = "in TINKER_API_KEY"
    else:
        place = f"in {credentials_path(Path.home())}"
    return Finding("credential", "ok", f"a {source.kind} {place}".replace("a command ", "one "))


def server(config: Config) -> Finding:
    """A remote server: whether it can be reached and accepts the credential, and its models."""
    try:
        seen = look(
            replace(config, bootstrap_deadline_s=_PATIENCE_S, submit_deadline_s=_PATIENCE_S)
        )
    except TinkerError as error:
        # A proxy's error has its own next step.
        start = "" if isinstance(error, ProxyError) else _START
        return Finding("server", "fail", describe(error), next_step(error) or start)
    return Finding("server", "ok", _offer(seen))


def embedded_server(config: Config) -> Finding:
    """The embedded server: started with a temporary folder and asked for its models."""
    folder = config.data_dir or DATA_DIR
    owner = owner_of(folder)
    if owner is not None:
        return Finding(
            "server",
            "warn",
            f"{folder} is used by another server (process {owner})",
            "End it, or use it: set TINKER_BASE_URL and TINKER_API_KEY.",
        )
    throwaway = replace(
        config,
        data_dir=None,
        embedded_models=("tinkex/tiny",),
        bootstrap_deadline_s=_START_S,
        submit_deadline_s=_START_S,
    )
    try:
        seen = look(throwaway)
    except MissingPackageError as error:
        return Finding("server", "fail", describe(error), "Do one of these.")
    except TinkerError as error:
        return Finding("server", "fail", describe(error), next_step(error) or "Try again.")
    return Finding("server", "ok", f"an embedded server starts; {_offer(seen)}")


def look(config: Config) -> ServerAnswer:
    """Ask a server for its models; raises the error if it cannot be reached."""
    connection = Connection(config)
    try:
        return connection.operations.block(lambda: _ask(connection))
    finally:
        connection.close().result()


async def _ask(connection: Connection) -> ServerAnswer:
    api = await connection.connected()
    # Not `call`: with an account that cannot pay, that would wait for it to recover.
    reply = await api.send(routes.GET_SERVER_CAPABILITIES, None)
    api.raise_for(reply, routes.GET_SERVER_CAPABILITIES)
    offered = msgspec.json.decode(reply.body, type=dict[str, Any])
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        asked = connection.clock.now()
        await api.send(routes.HEALTHZ, None)
        rounds.append(connection.clock.now() - asked)
    names = [str(model.get("model_name")) for model in offered.get("supported_models", ())]
    return ServerAnswer(names, min(rounds), await _version(api))


async def _version(api: Api) -> str | None:
    """The version of a tinkex server; other servers have no such page."""
    try:
        reply = await api.send(_DESCRIPTION, None)
        info = msgspec.json.decode(reply.body, type=dict[str, Any])["info"]
    except (APIError, msgspec.MsgspecError, KeyError):
        return None
    return f"{info.get('title')} {info.get('version')}" if reply.status == 200 else None


def _offer(seen: ServerAnswer) -> str:
    shown = ", ".join(seen.models[:_SHOWN_MODELS])
    more = len(seen.models) - _SHOWN_MODELS
    names = f"{shown} and {more} more" if more > 0 else shown
    who = "" if seen.version is None else f"{seen.version}, "
    return f"{who}answers in {seen.latency_s * 1000:.1f} ms, has {names or 'no models'}"


def owner_of(folder: Path) -> str | None:
    """The process whose server has claimed a data folder; None when it is free."""
    try:
        with (folder / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "unknown"
    except OSError:  # no folder yet
        return None
    return None
