"""Settings: one immutable `Config`, built at the edge and handed to everything.

The only reader of the environment. An explicit argument beats the environment, which beats the
stored credentials file; an empty value counts as not set.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tinkex import proxy as proxies
from tinkex import urls
from tinkex.announcement import announced
from tinkex.credentials import credentials_path, read_store
from tinkex.errors import InputError, InputTypeError
from tinkex.proxy import ProxyRules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.proxy import Proxy

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
EMBEDDED = "embedded"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that is used where none is named."""
DATA_DIR = Path("tinkex-data")
"""Where a server keeps its data by default."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_SERVER = "TINKEX_"
_EMBEDDED = "TINKEX_EMBEDDED_"
_SERVER_FOLDER = "TINKEX_EMBEDDED_SERVER"
# Variables that nodes on other machines need.
_PASSED_PREFIXES = (_SERVER, "AWS_", "AZURE_STORAGE_", "PG")
_PASSED = frozenset({"HF_TOKEN", "HF_ENDPOINT", "FSSPEC_S3_ENDPOINT_URL"})
_ON = frozenset({"1", "true", "yes", "on"})
# Never shown and never pickled: a process resolves credentials of its own.
_SECRETS = frozenset({"api_key", "stored_key", "credential_cmd", "headers", "proxy"})
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def _secret(default: Any) -> Any:
    return field(default=default, repr=False, hash=False)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a client. Use `Config.load()`; the constructor reads nothing.

    `api_key` is the key given or found in `TINKER_API_KEY`, `stored_key` the default of the
    credentials file. `proxy` is the URL of a proxy for every request, or the rules that
    `Config.load()` found in the environment. All of them, the credential command and the extra
    headers stay out of `repr` and of pickles: an unpickled Config takes them from its own process.
    """

    base_url: str = DEFAULT_BASE_URL
    api_key: str | None = _secret(None)
    credential_cmd: str | None = _secret(None)
    stored_key: str | None = _secret(None)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)
    proxy: ProxyRules | str | None = field(default=None, repr=False, hash=False)
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    telemetry: bool = True
    log_level: int | None = None
    embedded: bool = False
    embedded_models: tuple[str, ...] = ()
    data_dir: Path | None = None
    connect_timeout_s: float = 4.0
    bootstrap_deadline_s: float = 120.0
    submit_deadline_s: float = 300.0
    silence_deadline_s: float = 300.0
    total_deadline_s: float | None = None

    def __post_init__(self) -> None:
        base_url = urls.normalise(self.base_url)
        object.__setattr__(self, "base_url", base_url)
        object.__setattr__(self, "headers", MappingProxyType(_headers(self.headers)))
        object.__setattr__(self, "tags", _distinct(self.tags))
        object.__setattr__(self, "proxy", _proxy(self.proxy))
        for name in (f.name for f in fields(self) if f.name.endswith("_s")):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError("must be a positive number of seconds", name)

    def __reduce__(self) -> tuple[Any, ...]:
        public = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _SECRETS}
        return _from_pickle, (public,)

    @property
    def server_proxy(self) -> Proxy | None:
        """The proxy that requests to `base_url` go through."""
        if self.embedded:
            return None
        return proxies.rules(self.proxy).choose(urls.parse(self.base_url))

    def proxy_secrets(self) -> tuple[str, ...]:
        """The password of the server's proxy, in the forms that must never be recorded."""
        try:
            chosen = self.server_proxy
        except InputError:  # then it is never used
            return ()
        return () if chosen is None else chosen.secrets()

    @classmethod
    def load(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        env: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> Config:
        """Settings from arguments, the environment and the stored credentials, in that order.

        With neither a URL nor any credential anywhere, or with `embedded` as the URL, the result is
        marked `embedded`. Raises InputError naming the setting that is malformed.
        """
        env = os.environ if env is None else env
        given = (("base_url", base_url), ("project_id", project_id), (proxies.SETTING, proxy))
        for name, value in given:
            _check_text(value, name)
        url = base_url or env.get("TINKER_BASE_URL") or ""
        by_name = url == EMBEDDED
        url = "" if by_name else url
        setting = "base_url" if base_url else "TINKER_BASE_URL"
        key = _key(api_key, "api_key") or _key(env.get("TINKER_API_KEY"), "TINKER_API_KEY")
        command = env.get("TINKER_CREDENTIAL_CMD") or None
        if url and not api_key:
            # The key of this program's own embedded server beats a key for another server.
            key = _own_key(url, env) or key
        stored = None
        if not (key or command or by_name):
            # Read only if it is needed: a damaged file must not fail other programs.
            stored = read_store(credentials_path(home or Path.home())).default_key
        loaded = cls(
            base_url=urls.normalise(url, setting=setting) if url else DEFAULT_BASE_URL,
            api_key=key,
            credential_cmd=command,
            stored_key=stored,
            headers={**_cloudflare(env), **_headers({} if headers is None else headers)},
            proxy=proxy or _proxies_of(env),
            project_id=project_id or env.get("TINKER_PROJECT_ID") or None,
            tags=_distinct(env.get("TINKER_TAGS", "").split(",")),
            telemetry=env.get("TINKER_TELEMETRY", "1").strip().lower() in _ON,
            log_level=_level(env.get("TINKER_LOG", "")),
            embedded=by_name or not (url or key or command or stored),
            embedded_models=_distinct(env.get("TINKEX_EMBEDDED_MODELS", "").split(",")),
            data_dir=Path(env["TINKEX_DATA_DIR"]) if env.get("TINKEX_DATA_DIR") else None,
        )
        # Raises for a bad proxy variable if this server's requests would use it.
        _ = loaded.server_proxy
        return loaded


def server_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `TINKEX_*` settings of a server in this process; empty variables count as not set."""
    env = os.environ if env is None else env
    given = {name: value for name, value in env.items() if name.startswith(_SERVER) and value}
    return {
        name.removeprefix(_SERVER).lower(): value
        for name, value in given.items()
        if not name.startswith(_EMBEDDED)
    }


def process_environment() -> dict[str, str]:
    """The environment of this process, for a program that it starts."""
    return dict(os.environ)


def node_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the nodes of a cluster get from the process that starts them.

    Settings of a server, and credentials of databases, object stores and the model hub.
    """
    env = os.environ if env is None else env
    return {
        name: value
        for name, value in env.items()
        if (name.startswith(_PASSED_PREFIXES) or name in _PASSED)
        and value
        and not name.startswith(_EMBEDDED)
    }


def ray_address(env: Mapping[str, str] | None = None) -> str | None:
    """The Ray cluster that Ray's own programs use, too."""
    return (os.environ if env is None else env).get("RAY_ADDRESS") or None


def keep_ray_on_loopback() -> None:
    """Let Ray use 127.0.0.1 in this process and its children; call it before Ray is imported.

    Ray replaces that address by one that other machines can reach, except on systems where it
    supports no clusters; this is its switch for those.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def announce_to_children(folder: Path) -> None:
    """Let the processes that this one starts find its embedded server."""
    os.environ[_SERVER_FOLDER] = str(folder)


def announced_folder(env: Mapping[str, str] | None = None) -> str | None:
    """The folder of the embedded server that this process or a parent of it announced."""
    return (os.environ if env is None else env).get(_SERVER_FOLDER)


def _own_key(url: str, env: Mapping[str, str]) -> str | None:
    found = announced(announced_folder(env))
    return found.key if found is not None and found.url == url.rstrip("/") else None


def _from_pickle(public: dict[str, Any]) -> Config:
    here = Config.load()
    return replace(here, **public)


def _cloudflare(env: Mapping[str, str]) -> dict[str, str]:
    names = {
        "CF-Access-Client-Id": "CLOUDFLARE_ACCESS_CLIENT_ID",
        "CF-Access-Client-Secret": "CLOUDFLARE_ACCESS_CLIENT_SECRET",
    }
    return {header: env[name] for header, name in names.items() if env.get(name)}


def _proxies_of(env: Mapping[str, str]) -> ProxyRules | None:
    """What the environment says about proxies.

    A lower-case variable beats the same one in upper case, also when it is empty.
    """
    found: dict[str, tuple[str, str]] = {}
    for upper in _PROXY_VARIABLES:
        name = upper.lower() if upper.lower() in env else upper
        # In a CGI script HTTP_PROXY is the `Proxy:` header of the incoming request.
        if env.get(name) and not (name == "HTTP_PROXY" and "REQUEST_METHOD" in env):
            found[upper.lower()] = (name, env[name])
    return ProxyRules.from_variables(found) if found.keys() - {"no_proxy"} else None


def _proxy(value: object) -> ProxyRules | None:
    """Rules that hold for a proxy given as a URL; the error never repeats it."""
    if value is None or isinstance(value, ProxyRules):
        return value
    _check_text(value, proxies.SETTING)
    return proxies.rules(str(value)) if value else None


def _check_text(value: object, setting: str) -> None:
    if not (value is None or isinstance(value, str)):
        raise InputTypeError(f"must be a string, not {type(value).__name__}", setting)


def _key(value: object, setting: str) -> str | None:
    """A key that can travel in a header; the error never repeats it."""
    _check_text(value, setting)
    key = str(value or "")
    if not (key.isascii() and key.isprintable()):
        raise InputError("must be one line of ASCII text", setting)
    return key or None


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    """One value per name, whatever its case: the last one given."""
    if not isinstance(headers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's value
        raise InputTypeError(f"must be a mapping, not {type(headers).__name__}", "headers")
    by_name: dict[str, tuple[str, str]] = {}
    for name, value in headers.items():
        _check_text(name, "headers")
        _check_text(value, f"headers[{name!r}]")
        text = name + value
        if not name or not text.isascii() or any(char in text for char in "\r\n\0"):
            raise InputError("must be one line of ASCII text", f"headers[{name!r}]")
        if name.lower() == "x-api-key":
            raise InputError("is set by the client; pass api_key= instead", f"headers[{name!r}]")
        if name.lower() == "proxy-authorization":
            raise InputError(
                "is set by the client; pass proxy=http://user:password@host:port instead",
                f"headers[{name!r}]",
            )
        by_name[name.lower()] = (name, value)
    return dict(by_name.values())


def _distinct(tags: Iterable[str]) -> tuple[str, ...]:
    """Without empty ones and repetitions, in the order given."""
    return tuple(dict.fromkeys(tag for tag in (raw.strip() for raw in tags) if tag))


def _level(text: str) -> int | None:
    if not text.strip():
        return None
    level = _LEVELS.get(text.strip().lower())
    if level is None:
        raise InputError(f"must be one of {', '.join(_LEVELS)}", "TINKER_LOG")
    return level
