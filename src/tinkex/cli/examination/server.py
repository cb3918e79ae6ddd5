"""The settings, the credential, and the server that they lead to."""

from __future__ import annotations

import fcntl
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.cli.connect import load_config
from tinkex.cli.examination.finding import Finding
from tinkex.cli.failures import describe, next_step
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
class Seen:
    """What a server says of itself."""

    models: list[str]
    latency_s: float
    version: str | None


def findings() -> Iterator[Finding]:
    """Where commands and programs would go, and whether they would get there."""
    try:
        # Errors only: what a warning would say is about to be a finding.
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
    """What was said, and where it leads; never a secret."""
    if config.embedded:
        where = "commands start a server of their own, here"
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
    """Whether there is one and where it comes from; it is not shown."""
    if config.embedded:
        return Finding("credential", "ok", "none, and none is needed here")
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
    """A server elsewhere: can it be reached, does it take the credential, what does it offer."""
    try:
        seen = look(
            replace(config, bootstrap_deadline_s=_PATIENCE_S, submit_deadline_s=_PATIENCE_S)
        )
    except TinkerError as error:
        # What a proxy refuses is said with its own next step.
        start = "" if isinstance(error, ProxyError) else _START
        return Finding("server", "fail", describe(error), next_step(error) or start)
    return Finding("server", "ok", _offer(seen))


def embedded_server(config: Config) -> Finding:
    """A server of one's own: started here, with a throwaway folder, and asked."""
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
    return Finding("server", "ok", f"one can be started here; {_offer(seen)}")


def look(config: Config) -> Seen:
    """Ask a server about itself; raises what keeps us from it."""
    connection = Connection(config)
    try:
        return connection.operations.block(lambda: _ask(connection))
    finally:
        connection.close().result()


async def _ask(connection: Connection) -> Seen:
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
    return Seen(names, min(rounds), await _version(api))


async def _version(api: Api) -> str | None:
    """The version of a server of ours; others do not say."""
    try:
        reply = await api.send(_DESCRIPTION, None)
        info = msgspec.json.decode(reply.body, type=dict[str, Any])["info"]
    except (APIError, msgspec.MsgspecError, KeyError):
        return None
    return f"{info.get('title')} {info.get('version')}" if reply.status == 200 else None


def _offer(seen: Seen) -> str:
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
