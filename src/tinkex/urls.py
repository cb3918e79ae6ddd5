"""Base URLs: the only module that parses, compares and joins them.

Owns normalisation (default ports, host case, trailing slashes, path prefix), joining, query
strings, and the key by which clients share a rate limit.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, urlsplit

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Everything RFC 3986 allows in a path, plus the percent sign of what is escaped already.
_PATH_SAFE = "/%:@!$&'()*+,;=-._~"


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """A normalised base URL; two spellings of one server compare equal."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as the Host header wants them: no default port, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def host_and_port(self) -> str:
        """Host and port as CONNECT wants them: always with the port, IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme and authority: what a connection belongs to."""
        return f"{self.scheme}://{self.authority}"

    @property
    def secure(self) -> bool:
        """Whether connections are TLS."""
        return self.scheme == "https"

    def target(self, path: str, query: str = "") -> str:
        """The request target of an API path below this base."""
        return f"{self.path}{path}?{query}" if query else f"{self.path}{path}"

    def __str__(self) -> str:
        return f"{self.origin}{self.path}"


def parse(url: str, *, setting: str = "base_url") -> BaseUrl:
    """Read a base URL; raises InputError naming `setting` and the fix, and quoting no secret."""
    text = url.strip()
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InputError("is not a URL; write it as https://host:port/prefix", setting) from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise InputError("must start with http:// or https://", setting)
    if "@" in parts.netloc:
        raise InputError(
            "must not contain a user name or password; keys belong in TINKER_API_KEY", setting
        )
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise InputError("must not have a query or fragment (`?…`, `#…`)", setting)
    if not parts.hostname or port == 0:
        raise InputError("needs a host and a valid port, such as http://localhost:8000", setting)
    return BaseUrl(
        scheme=scheme,
        host=_host(parts.hostname, setting),
        port=port or _DEFAULT_PORTS[scheme],
        path=_prefix(parts.path, setting),
    )


def normalise(url: str, *, setting: str = "base_url") -> str:
    """The one spelling of a base URL: no default port, no trailing slash, lower-case host."""
    return str(parse(url, setting=setting))


def join(base: str | BaseUrl, path: str, query: str = "") -> str:
    """The full URL of an API path; `path` is appended to the base's own, never replaces it."""
    where = base if isinstance(base, BaseUrl) else parse(base)
    return where.origin + where.target(path, query)


def encode_query(values: Mapping[str, object]) -> str:
    """Percent-encoded `key=value` pairs: lists with commas, objects as `a[b]`, nothing empty."""
    pairs = (pair for name, value in values.items() for pair in _flatten(name, value))
    return "&".join(f"{quote(name, safe='[]')}={quote(value, safe='')}" for name, value in pairs)


def limiter_key(url: str, credential: str | None) -> tuple[str, str]:
    """Clients with equal keys share one rate limit; the credential is only present as a digest."""
    digest = hashlib.sha256((credential or "").encode()).hexdigest()[:16]
    return normalise(url), digest


def _host(host: str, setting: str) -> str:
    try:
        name = host.encode("ascii") if host.isascii() else host.encode("idna")
    except UnicodeError:
        raise InputError("has a host name that cannot exist", setting) from None
    text = name.decode().lower().rstrip(".")
    if not text or any(char in ' %<>\\^`{|}"\x7f' or char < "!" for char in text):
        raise InputError("has a host name that cannot exist", setting)
    return text


def _prefix(path: str, setting: str) -> str:
    segments = path.strip("/").split("/")
    if any(segment in (".", "..") for segment in segments):
        raise InputError("must not contain `.` or `..` in its path", setting)
    if any(char < "!" or char == "\x7f" for char in path):
        raise InputError("must not contain spaces or control characters", setting)
    prefix = quote(path.rstrip("/"), safe=_PATH_SAFE)
    return prefix if not prefix or prefix.startswith("/") else f"/{prefix}"


def _flatten(name: str, value: object) -> Iterator[tuple[str, str]]:
    match value:
        case None | "":
            return
        case bool():
            yield name, "true" if value else "false"
        case dict():
            for key, inner in cast("dict[str, object]", value).items():
                yield from _flatten(f"{name}[{key}]", inner)
        case list() | tuple():
            items = cast("Sequence[object]", value)
            texts = [text for item in items for _, text in _flatten(name, item)]
            if texts:
                yield name, ",".join(texts)
        case dt.date():  # datetimes too
            yield name, value.isoformat()
        case _:
            yield name, str(value)
