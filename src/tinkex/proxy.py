"""Proxies: which one a request goes through.

Pure: `config.py` reads the variables, `pool.py` opens the connections, `proxy_failure.py` says what
went wrong. A proxy's user name and password are in no repr and in no message.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tinkex import urls
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.urls import BaseUrl

SETTING = "proxy"
_FORM = (
    "must be http://host:port or http://user:password@host:port; percent-encode special characters "
    "of the user name and the password, such as %40 for @"
)
_SUPPORTED = (
    "names a SOCKS proxy, which is not supported; use an HTTP proxy, http://host:port or "
    "https://host:port"
)


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy. `setting` is where the user named it, `authorization` what it wants to see."""

    address: BaseUrl
    setting: str
    authorization: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.address.origin

    @property
    def shown_setting(self) -> str:
        """The setting as messages write it: a variable, or the argument `proxy=`."""
        return f"{SETTING}=" if self.setting == SETTING else self.setting

    def secrets(self) -> tuple[str, ...]:
        """What must never be recorded."""
        if self.authorization is None:
            return ()
        token = self.authorization.removeprefix("Basic ")
        _, _, password = base64.b64decode(token).decode().partition(":")
        return tuple(filter(None, (token, password)))


def parse(url: str, setting: str = SETTING) -> Proxy:
    """Read the URL of a proxy; raises InputError naming `setting` and quoting nothing."""
    text = url.strip()
    if "://" not in text:
        text = f"http://{text}"
    if text.lower().startswith("socks"):
        raise InputError(_SUPPORTED, setting)
    try:
        parts = urlsplit(text)
        user_info, at, host = parts.netloc.rpartition("@")
        address = urls.parse(f"{parts.scheme}://{host}", setting=setting)
        authorization = _basic(user_info) if at else None
    except ValueError:  # InputError is one
        raise InputError(_FORM, setting) from None
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise InputError(_FORM, setting)
    return Proxy(address, setting, authorization)


def _basic(user_info: str) -> str:
    user, _, password = user_info.partition(":")
    pair = f"{unquote(user)}:{unquote(password)}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


# -- which proxy ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exemption:
    """One entry of NO_PROXY: hosts, perhaps of one port or scheme, that are connected directly."""

    scheme: str
    host: str
    port: int | None
    network: IPv4Network | IPv6Network | None

    def covers(self, base: BaseUrl, address: IPv4Address | IPv6Address | None) -> bool:
        """Whether `base`, whose host is `address` if it is one, is meant."""
        if self.scheme not in ("", "all", base.scheme) or self.port not in (None, base.port):
            return False
        if self.network is not None:
            return address is not None and address in self.network
        if self.host == "*":
            return True
        # The name itself and every name below it.
        return address is None and f".{base.host}".endswith(f".{self.host}")


@dataclass(frozen=True, slots=True)
class ProxyRules:
    """Which proxy a request goes through: by the scheme of its URL, except for some hosts.

    Proxies are (setting, URL) pairs and parsed when they are used, so that a variable meant for
    other programs does no harm. Loopback addresses are connected directly unless `loopback`.
    """

    http: tuple[str, str] | None = field(default=None, repr=False)
    https: tuple[str, str] | None = field(default=None, repr=False)
    exemptions: tuple[Exemption, ...] = ()
    loopback: bool = False

    @classmethod
    def always(cls, url: str, setting: str = SETTING) -> ProxyRules:
        """One proxy for everything, loopback included; raises InputError for a bad URL."""
        parse(url, setting)
        return cls((setting, url), (setting, url), loopback=True)

    @classmethod
    def from_variables(cls, variables: Mapping[str, tuple[str, str]]) -> ProxyRules:
        """The rules of `http_proxy` and so on, each given as its spelling and its value."""
        everything = variables.get("all_proxy")
        _, exempt = variables.get("no_proxy", ("", ""))
        found = (_exemption(entry) for entry in exempt.replace(",", " ").split())
        return cls(
            variables.get("http_proxy", everything),
            variables.get("https_proxy", everything),
            tuple(entry for entry in found if entry is not None),
        )

    def choose(self, base: BaseUrl) -> Proxy | None:
        """The proxy for requests to `base`; raises InputError when its URL is malformed."""
        given = self.https if base.secure else self.http
        if given is None:
            return None
        address = _address(base.host)
        if not self.loopback and _is_loopback(base.host, address):
            return None
        if any(entry.covers(base, address) for entry in self.exemptions):
            return None
        setting, url = given
        return parse(url, setting)


NO_PROXIES = ProxyRules()


def rules(proxy: ProxyRules | str | None) -> ProxyRules:
    """The rules that the setting `proxy` stands for; an empty one is no proxy."""
    if isinstance(proxy, ProxyRules):
        return proxy
    return ProxyRules.always(proxy) if proxy else NO_PROXIES


def _exemption(entry: str) -> Exemption | None:
    """An entry as curl, requests and httpx read it; None for one that can match nothing."""
    scheme, _, place = entry.lower().rpartition("://")
    network = _network(place)
    if network is not None:
        return Exemption(scheme, "", None, network)
    host, colon, digits = place.rpartition(":")
    if not (colon and digits.isdecimal()):
        host, digits = place, ""
    port = int(digits) if digits else None
    network = _network(host.strip("[]"))
    host = host if host == "*" else host.removeprefix("*").strip(".")
    if not host:
        return None
    return Exemption(scheme, "" if network else host, port, network)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str, address: IPv4Address | IPv6Address | None) -> bool:
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    # Unspecified (0.0.0.0) reaches this machine, too.
    return address.is_loopback or address.is_unspecified
