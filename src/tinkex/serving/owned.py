"""A server that belongs to another process, which started it (`embedded`); it ends with that one.

The first line of its standard input is an `OwnedServerSpec`. It shuts down at the end of that
input, which means that the owner has exited. It reports by lines on standard output, each a JSON
object with `phase`, `warning`, `ready` or `error`. Its log goes to standard error.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import msgspec

from tinkex.announcement import Announcement, announce, withdraw
from tinkex.config import server_environment
from tinkex.engine.process.child import LOG_NAME as ENGINE_LOG
from tinkex.server.observability.logs import install
from tinkex.serving.data_dir import url_of
from tinkex.serving.host_settings import HostSettings, load_settings
from tinkex.serving.process import Host, run_host

_HARD_LIMIT_S: Final = 5.0
# By then the server of a program that was killed has exited.
_WAIT_S: Final = 2 * _HARD_LIMIT_S


class OwnedServerSpec(msgspec.Struct, frozen=True):
    """What to serve, with which key, and on which inherited socket."""

    models: tuple[str, ...]
    data_dir: str
    throwaway: bool
    key: str
    listener: int

    def __repr__(self) -> str:
        return f"OwnedServerSpec({self.models}, {self.data_dir})"  # without the key


def main() -> None:
    """Serve until the owner exits; never returns."""
    reports = _take_stdout()
    # A terminal sends it to the whole process group; the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=OwnedServerSpec)
    status = 0
    try:
        _serve(spec, reports)
    except Exception as error:  # reported to the owner
        logging.getLogger(__name__).debug("the server ended", exc_info=True)
        _report(reports, error={"kind": type(error).__name__, "message": str(error)})
        status = 1
    _clean_up(spec)
    os._exit(status)


def _serve(spec: OwnedServerSpec, reports: IO[bytes]) -> None:
    settings = _settings(spec)
    install(settings.log_format, sys.stderr, getattr(logging, settings.log_level.upper()))
    logging.getLogger(ENGINE_LOG).addHandler(_Reported(reports))
    folder = Path(spec.data_dir)

    def on_ready(url: str) -> None:
        announce(folder, Announcement(url, spec.key, spec.models, os.getpid()))
        _report(reports, ready=url)

    listener = socket.socket(fileno=spec.listener)
    host = Host(
        settings,
        replace(settings.server, key_mode="fixed", keys=frozenset({spec.key})),
        listener,
        on_ready=lambda: on_ready(url_of(listener)),
        on_phase=lambda phase: _report(reports, phase=phase),
    )
    _watch_owner(host, spec)
    run_host(host, settings.data_dir, wait_s=_WAIT_S)


class _Reported(logging.Handler):
    """Reports warnings to the owner, besides writing them to the log."""

    def __init__(self, reports: IO[bytes]) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        _report(self._reports, warning=record.getMessage())


def _settings(spec: OwnedServerSpec) -> HostSettings:
    flags: dict[str, object] = {
        "base_models": list(spec.models),
        "data_dir": spec.data_dir,
        "auth": "keys",
        "deferred": True,
        # When it shuts down its owner has exited, so no caller waits for what runs.
        "shutdown_s": 0.0,
    }
    env = {k: v for k, v in server_environment().items() if k not in ("host", "port", *flags)}
    # Its log is read only after trouble.
    settings = load_settings(flags, {"log_level": "warning", **env})
    # Its only clients are on this machine and connect to the socket that it inherits.
    return replace(
        settings, tls_cert=None, tls_key=None, public_url=None, allowed_hosts=(), trusted_proxies=()
    )


def _watch_owner(host: Host, spec: OwnedServerSpec) -> None:
    def watch() -> None:
        sys.stdin.buffer.read()
        host.stop_from_thread()
        # A shutdown that hangs has no caller any more.
        hard = threading.Timer(_HARD_LIMIT_S, _leave, [spec])
        hard.daemon = True
        hard.start()

    threading.Thread(target=watch, name="tinkex-owner", daemon=True).start()


def _leave(spec: OwnedServerSpec) -> None:
    _clean_up(spec)
    os._exit(1)


def _clean_up(spec: OwnedServerSpec) -> None:
    withdraw(Path(spec.data_dir))
    if spec.throwaway:
        shutil.rmtree(spec.data_dir, ignore_errors=True)


def _take_stdout() -> IO[bytes]:
    """The pipe to the owner; what other code prints goes to the log."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return reports


def _report(reports: IO[bytes], **what: object) -> None:
    try:
        reports.write(msgspec.json.encode(what) + b"\n")
    except OSError:
        logging.getLogger(__name__).debug("the owner does not read any more")
