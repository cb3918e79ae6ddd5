"""The certificate of a server: checked when it starts, and loaded again when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# With forward secrecy and authenticated encryption only; TLS 1.3 has no others.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_LOOK_EVERY_S: Final = 2.0

_log = logging.getLogger(__name__)


class Tls:
    """A certificate with its key. `watching()` loads it again when the files change or on SIGHUP.

    A pair that cannot be loaded leaves the one before in use.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        # Mutable state: the context of new connections, the state of the files that it was made
        # from, and the timer of the next look at them.
        self._seen = self._state()
        self.context = load_context(certificate, key)
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Look at the files every few seconds; needs a running loop."""
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look)
        try:
            yield
        finally:
            self._timer.cancel()
            with suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGHUP)

    def reload(self) -> None:
        """Load the files again; connections that are open keep what they have."""
        self._seen = self._state()
        try:
            self.context = load_context(self._certificate, self._key)
        except InputError as error:
            _log.error("the TLS certificate was not renewed, the one before stays: %s", error)
        else:
            _log.info("the TLS certificate was loaded again from %s", self._certificate)

    def _look(self) -> None:
        if self._state() != self._seen:
            self.reload()
        self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_file_state(path) for path in (self._certificate, self._key))


def load_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for TLS 1.2 and later; raises an InputError that says what to do."""
    _check_readable(certificate, "tls_cert")
    _check_readable(key, "tls_key")
    _check_private(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        raise _not_a_pair(error, certificate, key) from error
    except OSError as error:
        raise InputError(f"the TLS files cannot be read: {error.strerror}", "tls_cert") from error
    return context


def _no_password() -> str:
    # Without it OpenSSL would ask on the terminal, and the server would wait for ever.
    raise InputError("is encrypted; give a key without a password", "tls_key")


def _not_a_pair(error: ssl.SSLError, certificate: Path, key: Path) -> InputError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return InputError(f"{key} is not the key of the certificate {certificate}", "tls_key")
    return InputError(
        f"{certificate} and {key} must be a certificate (with its chain, if there is one) and its "
        f"key as PEM: {error.reason or error}",
        "tls_cert",
    )


def _check_readable(path: Path, setting: str) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", setting) from error


def _check_private(key: Path) -> None:
    # A group may read it: that is how certificates are shared with servers that are not root.
    if stat.S_IMODE(key.stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise InputError(
            f"{key} can be read or changed by other users: run `chmod 600 {key}`", "tls_key"
        )


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
