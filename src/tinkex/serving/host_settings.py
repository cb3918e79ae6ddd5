"""The settings of a server process: from defaults, a file, the environment and flags.

One flat list of names everywhere: `long_poll_s` in the file, `TINKEX_LONG_POLL_S` in the
environment, `--set long_poll_s=20` on the command line. A name that does not exist and a value that
does not fit are refused by name.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from tinkex.config import DATA_DIR, DEFAULT_MODEL
from tinkex.engine.process.spec import DtypeName
from tinkex.errors import InputError
from tinkex.server.server_settings import ServerSettings
from tinkex.server.store.ownership import NodeRole
from tinkex.serving.connections import ConnectionLimits, connection_limits
from tinkex.serving.tls import Tls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Auth = Literal["keys", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

FILE: Final = "tinkex.toml"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_SHORTEST_LEASE_S: Final = 1.0
_NO_LIMIT: Final = "none"  # TOML and the environment have no null


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The settings of `tinkex serve`; `load_settings` makes one."""

    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path = DATA_DIR
    database: str | None = None
    """None is the SQLite file `tinkex.db` in `data_dir`."""
    artifacts: str | None = None
    """Where saved adapters go: any fsspec URL; None is a folder in `data_dir`."""
    base_models: tuple[str, ...] = (DEFAULT_MODEL,)
    """`NAME`, or `NAME=FOLDER` to serve a folder under another name."""
    auth: Auth = "keys"
    deferred: bool = False
    """Whether base models are loaded only when they are first used."""
    device: str = "auto"
    """`auto` is `cuda` where torch sees one, else `cpu`."""
    dtype: DtypeName | None = None
    """None is bfloat16 on `cuda` and float32 on `cpu`."""
    threads: int | None = None
    cache_bytes: int | None = None
    """The key/value cache of each base model; None is 1 GiB on a CPU, and a part of what is free
    on a CUDA device."""
    adapter_bytes: int | None = None
    """What adapters and snapshots may take on the device; None is a part of what is free there."""
    parked_bytes: int | None = None
    """What adapters that were moved off the device may take in host memory, before they go to disk.

    None is a part of all there is, and nothing where the device is the CPU."""
    join: str | None = None
    """The name of the cluster that this server is a node of; None is a server without others."""
    role: NodeRole = "full"
    """`api` is a node without an engine, which passes requests on to others."""
    node_name: str | None = None
    """How operators name this node; None is the machine's name and the port."""
    node_url: str | None = None
    """Where other nodes reach this one; None is the address that it listens on."""
    node_ca: Path | None = None
    """The certificates (PEM) that other nodes' are checked against; None is the system's."""
    lease_s: float = 15.0
    """How long a node may be silent before others take over what it owns."""
    rebalance_s: float = 60.0
    """How often a key may move from a node with many to one with few; 0 is never."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    audit_file: str | None = None
    """Where the audit log is copied to, line by line as JSON; None is nowhere."""
    tls_cert: Path | None = None
    """The certificate as PEM, with its chain; with `tls_key`, the server speaks only TLS."""
    tls_key: Path | None = None
    public_url: str | None = None
    """The address that clients use, for links; None is the one that a request was sent to."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the server answers to; none is any, but only loopback names without keys."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    max_connections: int | None = None
    """None is what the limit of open files allows, up to 8192."""
    max_connections_per_address: int | None = None
    """None is half of all; trusted proxies have no limit of their own."""
    head_timeout_s: float = 20.0
    """How long the head of a request may take from its first byte on."""
    body_stall_s: float = 30.0
    """How long a body may make no progress; `upload_timeout_s` limits all of it."""
    send_stall_s: float = 60.0
    """How long a client may not read its answer."""
    engine_stopped_timeout_s: float = 90.0
    """How long a stopped engine process (SIGSTOP, a debugger) is waited for."""
    shutdown_s: float = 10.0
    """How long what runs may take to finish once the server shuts down."""
    server: ServerSettings = field(default_factory=ServerSettings)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def scheme(self) -> str:
        """How it is reached."""
        return "http" if self.tls_cert is None else "https"

    def tls(self) -> Tls | None:
        """The certificate and its key; raises an InputError when they cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Tls(self.tls_cert, self.tls_key)

    def connection_limits(self) -> ConnectionLimits:
        """What each connection may take, and all of them."""
        most, per_address = connection_limits(
            self.max_connections, self.max_connections_per_address
        )
        return ConnectionLimits(
            connections=most,
            per_address=per_address,
            proxies=tuple(ip_network(proxy) for proxy in self.trusted_proxies),
            head_s=self.head_timeout_s,
            body_stall_s=self.body_stall_s,
            send_stall_s=self.send_stall_s,
        )


_OWN: Final[dict[str, Any]] = {
    "host": str,
    "port": int,
    "data_dir": str,
    "database": str,
    "artifacts": str,
    "base_models": list[str],
    "auth": Auth,
    "deferred": bool,
    "device": str,
    "dtype": DtypeName,
    "threads": int,
    "cache_bytes": int,
    "adapter_bytes": int,
    "parked_bytes": int,
    "join": str,
    "role": NodeRole,
    "node_name": str,
    "node_url": str,
    "node_ca": str,
    "lease_s": float,
    "rebalance_s": float,
    "log_level": LogLevel,
    "log_format": LogFormat,
    "audit_file": str,
    "tls_cert": str,
    "tls_key": str,
    "public_url": str,
    "allowed_hosts": list[str],
    "trusted_proxies": list[str],
    "max_connections": int,
    "max_connections_per_address": int,
    "head_timeout_s": float,
    "body_stall_s": float,
    "send_stall_s": float,
    "engine_stopped_timeout_s": float,
    "shutdown_s": float,
}
_PATHS: Final = ("data_dir", "tls_cert", "tls_key", "node_ca")
_LISTS: Final = ("base_models", "allowed_hosts", "trusted_proxies")
# Of the server's settings only plain numbers: keys, secrets and client flags are made, not set.
_KINDS: Final[dict[str, Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "int | None": int | None,
    "float | None": float | None,
}


def server_kinds() -> dict[str, Any]:
    """The server's own settings that an operator may set, with their types."""
    kinds = {f.name: _KINDS[str(f.type)] for f in fields(ServerSettings) if str(f.type) in _KINDS}
    del kinds["grace_s"]  # said by shutdown_s
    return kinds


def known() -> dict[str, Any]:
    """Every name that can be set, with its type."""
    return {**_OWN, **server_kinds()}


def load_settings(
    flags: Mapping[str, object], env: Mapping[str, str], *, config: Path | None = None
) -> HostSettings:
    """Settings from defaults, a file, the environment and flags; later ones win.

    `env` is what `config.server_environment` found, by setting. `flags` holds only what was given.
    Without `config`, the file is `tinkex.toml` in the data directory, if there is one.
    """
    given = {**_parsed(env, "TINKEX_{}"), **_parsed(flags, "--{}")}
    path = config or Path(str(given.get("data_dir", HostSettings().data_dir))) / FILE
    if config is not None or path.is_file():
        given = {**_parsed(_read(path), f"{path}: {{}}"), **given}
    own = {name: value for name, value in given.items() if name in _OWN}
    own |= {name: Path(own[name]) for name in _PATHS if name in own}
    own |= {name: tuple(own[name]) for name in _LISTS if name in own}
    rest = {name: value for name, value in given.items() if name not in _OWN}
    settings = HostSettings(**own)
    settings = replace(settings, server=ServerSettings(**rest, grace_s=settings.shutdown_s))
    _check(settings)
    return settings


def _parsed(values: Mapping[str, object], place: str) -> dict[str, Any]:
    """Values of one source, checked; `place` names a setting as that source spells it."""
    kinds = known()
    found: dict[str, Any] = {}
    for name, value in values.items():
        spelled = place.format(_spelling(name, place))
        if name not in kinds:
            raise InputError(f"there is no such setting{_near(name, kinds, place)}", spelled)
        found[name] = _convert(value, kinds[name], spelled, typed=place.endswith(": {}"))
    return found


def _convert(value: object, kind: Any, spelled: str, *, typed: bool) -> Any:
    """A value of its type; only a file has types of its own, anything else is text."""
    if kind == list[str] and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if value == _NO_LIMIT and kind in (int | None, float | None):
        return None
    try:
        made = msgspec.convert(value, kind, strict=typed)
    except msgspec.ValidationError as error:
        raise InputError(f"{value!r} does not fit: {error}", spelled) from error
    number = isinstance(made, int | float) and not isinstance(made, bool)
    if number and not 0 <= made < math.inf:  # not isfinite: it takes no integer above 10**308
        raise InputError(f"must be a number from 0 on, got {value!r}", spelled)
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", "config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}", "config") from error


def _spelling(name: str, place: str) -> str:
    if place.startswith("TINKEX_"):
        return name.upper()
    return name.replace("_", "-") if place == "--{}" and name in _OWN else name


def _near(name: str, kinds: Mapping[str, Any], place: str) -> str:
    close = difflib.get_close_matches(name.lower(), list(kinds), 1)
    return f"; did you mean {place.format(_spelling(close[0], place))}?" if close else ""


def _check(settings: HostSettings) -> None:
    if settings.port > 65535:
        raise InputError(f"must be from 0 to 65535, got {settings.port}", "port")
    if settings.threads == 0:
        raise InputError("must be 1 or more, got 0", "threads")
    if settings.engine_stopped_timeout_s == 0:
        raise InputError("must be above 0, got 0", "engine_stopped_timeout_s")
    if not settings.base_models:
        raise InputError("name at least one", "base_models")
    names = [name for name, _ in base_models(settings)]
    if len(set(names)) < len(names):
        raise InputError(f"names must differ, got {', '.join(names)}", "base_models")
    _check_connections(settings)
    _check_node(settings)
    if settings.auth == "none" and not settings.on_loopback:
        raise InputError(
            f"lets in everybody who reaches {settings.host}; without keys a server listens on "
            "127.0.0.1 only: make a key with `tinkex key create`, and leave this out",
            "no_auth",
        )


def _check_connections(settings: HostSettings) -> None:
    for name in ("max_connections", "max_connections_per_address"):
        if getattr(settings, name) == 0:
            raise InputError("must be 1 or more, got 0", name)
    for name in ("head_timeout_s", "body_stall_s", "send_stall_s"):
        if getattr(settings, name) == 0:
            raise InputError("must be above 0, got 0", name)
    for proxy in settings.trusted_proxies:
        try:
            ip_network(proxy)
        except ValueError as error:
            raise InputError(
                f"must be addresses or networks such as 10.0.0.0/8: {error}", "trusted_proxies"
            ) from error
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_key" if settings.tls_key is None else "tls_cert"
        raise InputError("TLS needs both a certificate and its key", missing)
    url = urlsplit(settings.public_url or "http://host")
    if url.scheme not in ("http", "https") or not url.netloc or url.query or url.fragment:
        raise InputError(
            f"must be a URL such as https://tinker.example.com, got {settings.public_url!r}",
            "public_url",
        )


def _check_node(settings: HostSettings) -> None:
    if settings.join is None:
        alone = HostSettings()
        for name in ("role", "node_name", "node_url", "node_ca"):
            if getattr(settings, name) != getattr(alone, name):
                raise InputError("is for nodes of a cluster; name it with --join NAME", name)
        return
    if not _NAME.fullmatch(settings.join):
        raise InputError(
            f"must have up to 63 letters, digits, dots and dashes, got {settings.join!r}", "join"
        )
    if not (settings.database or "").startswith(("postgresql://", "postgres://")):
        raise InputError(
            "nodes share a database: name a PostgreSQL one with --database postgresql://…", "join"
        )
    if settings.artifacts is None:
        raise InputError(
            "nodes share saved weights: name an object store with --artifacts s3://…, or a folder "
            "that all of them see with --artifacts file:///…",
            "join",
        )
    for name, least in (("lease_s", _SHORTEST_LEASE_S), ("rebalance_s", 0.0)):
        if not getattr(settings, name) >= least:
            raise InputError(f"must be {least:g} or more, got {getattr(settings, name):g}", name)
    url = urlsplit(settings.node_url or "http://host")
    if url.scheme not in ("http", "https") or not url.netloc or url.path or url.query:
        raise InputError(
            f"must be a URL such as http://10.0.0.7:8000, got {settings.node_url!r}", "node_url"
        )


def base_models(settings: HostSettings) -> Iterator[tuple[str, str]]:
    """(name, where it comes from) of each base model."""
    for text in settings.base_models:
        name, equals, source = text.partition("=")
        if not name or (equals and not source):
            raise InputError(f"must be NAME or NAME=FOLDER, got {text!r}", "base_models")
        yield name, source or name
