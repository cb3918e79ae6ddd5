"""Messages for failures of a proxy, so that they are never taken for the server's.

Pure: `http.py` turns a `ProxyFailure` into an error of the tree.
"""

from __future__ import annotations

import socket
import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING

from tinkex.proxy import SETTING
from tinkex.transport.http_connection import BrokenReply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.proxy import Proxy

# Statuses that may change when tried again; any other one is a refusal. A proxy without tunnels
# answers 501.
_PASSING = frozenset({408, 425, 429, *range(500, 600)}) - {501}


class ProxyFailure(OSError):
    """A proxy failed, not the server: `problem` is an error, or the status of its answer."""

    def __init__(self, proxy: Proxy, problem: Exception | int) -> None:
        self.proxy = proxy
        self.problem = problem
        super().__init__(self.describe("the server"))

    @property
    def final(self) -> bool:
        """Whether the proxy has refused, so that another try would end the same way."""
        return isinstance(self.problem, int) and self.problem not in _PASSING

    def describe(self, server: str) -> str:
        """What went wrong on the way to `server`, and what to do about it."""
        if isinstance(self.problem, int):
            return self._answer(self.problem, server)
        return self._broken(self.problem)

    def _answer(self, status: int, server: str) -> str:
        proxy, setting = self.proxy, self.proxy.shown_setting
        answer = f"{status} {_phrase(status)}".rstrip()
        if status == 407 and proxy.authorization is None:
            return (
                f"The proxy {proxy} asks for a user name and a password ({answer}); put them into "
                f"{setting}, as in http://user:password@host:port."
            )
        if status == 407:
            return (
                f"The proxy {proxy} refused the user name or the password in {setting} ({answer}); "
                "correct them. Basic authentication is the only kind that tinkex supports."
            )
        if not self.final:
            return (
                f"The proxy {proxy} did not reach {server} (the proxy answered {answer}); check "
                f"the address of the server, and {setting}."
            )
        direct = "a client without proxy=" if proxy.setting == SETTING else "NO_PROXY"
        return (
            f"The proxy {proxy} refused to connect to {server} (the proxy answered {answer}); ask "
            f"its administrator to allow this server, or use {direct} to connect directly."
        )

    def _broken(self, problem: Exception) -> str:
        proxy, setting = self.proxy, self.proxy.shown_setting
        check = f"check {setting}, and that the proxy runs"
        match problem:
            case ConnectionRefusedError():
                return f"Nothing listens at the proxy {proxy} (connection refused); {check}."
            case TimeoutError() if problem.errno is None:
                return f"The proxy {proxy} did not open a connection in time ({problem}); {check}."
            case socket.gaierror():
                reason = problem.strerror
                return f"The host name of the proxy {proxy} cannot be resolved ({reason}); {check}."
            case ssl.SSLCertVerificationError():
                return (
                    f"The certificate of the proxy {proxy} was refused ({problem.verify_message}); "
                    f"check {setting}, or point SSL_CERT_FILE at your authority's certificates."
                )
            case ssl.SSLError():
                reason = getattr(problem, "reason", None) or problem
                return (
                    f"No TLS connection with the proxy {proxy} ({reason}); if "
                    f"the proxy does not use TLS, write http:// instead of https:// in {setting}."
                )
            case BrokenReply():
                return f"The reply of the proxy {proxy} is unusable: {problem}; {check}."
            case _:
                return f"The connection to the proxy {proxy} broke ({problem}); {check}."


def refusal(proxy: Proxy, status: int, headers: Mapping[str, str]) -> ProxyFailure | None:
    """The failure that a reply to a forwarded request stands for, if the proxy itself wrote it.

    Only a proxy answers 407. What else it answers looks like the server's, but the API's errors
    are JSON, and proxies write HTML or text.
    """
    if status == 407:
        return ProxyFailure(proxy, status)
    if status in (403, 502, 503, 504):
        by_itself = "error=" in headers.get("proxy-status", "")
        if by_itself or "json" not in headers.get("content-type", ""):
            return ProxyFailure(proxy, status)
    return None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
