"""A server that belongs to another process, which started it (`embedded`); it ends with that one.

The first line of its standard input says what to serve; the end of that input is the end of its
owner, however that came, and its own. It reports by lines on standard output, each a JSON object
with `phase`, `warning`, `ready` or `error`. What it logs goes to standard error.
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
from typing import IO, TYPE_CHECKING, Final

import msgspec

from tinkex.announcement import Announcement, announce, withdraw
from tinkex.config import server_environment
from tinkex.engine.process.child import LOG_NAME as ENGINE_LOG
from tinkex.server.observability.logs import install
from tinkex.serving.data_dir import url_of
from tinkex.serving.host_settings import HostSettings, load_settings
from tinkex.serving.process import Host, run_host

if TYPE_CHECKING:
    from tinkex.server.server_settings import ServerSettings

_HARD_LIMIT_S: Final = 5.0
# The server of a program that was killed is gone by then.
_WAIT_S: Final = 2 * _HARD_LIMIT_S


class Order(msgspec.Struct, frozen=True):
    """What to serve, to whom, and where."""

    models: tuple[str, ...]
    data_dir: str
    throwaway: bool
    key: str
    listener: int

    def __repr__(self) -> str:
        return f"Order({self.models}, {self.data_dir})"


def main() -> None:
    """Serve until the owner ends; never returns."""
    reports = _take_stdout()
    # The owner decides what these mean; a terminal sends them to everybody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    status = 0
    try:
        _serve(order, reports)
    except Exception as error:  # the owner is told
        logging.getLogger(__name__).debug("the server ended", exc_info=True)
        _report(reports, error={"kind": type(error).__name__, "message": str(error)})
        status = 1
    _clean_up(order)
    os._exit(status)


def _serve(order: Order, reports: IO[bytes]) -> None:
    settings = _settings(order)
    install(settings.log_format, sys.stderr, getattr(logging, settings.log_level.upper()))
    logging.getLogger(ENGINE_LOG).addHandler(_Reported(reports))
    folder = Path(order.data_dir)

    def on_ready(url: str) -> None:
        announce(folder, Announcement(url, order.key, order.models, os.getpid()))
        _report(reports, ready=url)

    listener = socket.socket(fileno=order.listener)
    host = Host(
        settings,
        _server_settings(order, settings),
        listener,
        on_ready=lambda: on_ready(url_of(listener)),
        on_phase=lambda phase: _report(reports, phase=phase),
    )
    _watch_owner(host, order)
    run_host(host, settings.data_dir, wait_s=_WAIT_S)


class _Reported(logging.Handler):
    """What the owner must hear of, besides its being in the log."""

    def __init__(self, reports: IO[bytes]) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        _report(self._reports, warning=record.getMessage())


def _settings(order: Order) -> HostSettings:
    flags: dict[str, object] = {
        "base_models": list(order.models),
        "data_dir": order.data_dir,
        "auth": "keys",
        "deferred": True,
        # Its owner has gone: nobody waits for what runs.
        "shutdown_s": 0.0,
    }
    env = {k: v for k, v in server_environment().items() if k not in ("host", "port", *flags)}
    # Nobody looks at its log while it works.
    return load_settings(flags, {"log_level": "warning", **env})


def _server_settings(order: Order, settings: HostSettings) -> ServerSettings:
    return replace(
        settings.server,
        key_mode="fixed",
        keys=frozenset({order.key}),
    )


def _watch_owner(host: Host, order: Order) -> None:
    def watch() -> None:
        sys.stdin.buffer.read()
        host.stop_from_thread()
        # Whatever hangs now, hangs for nobody.
        hard = threading.Timer(_HARD_LIMIT_S, _leave, [order])
        hard.daemon = True
        hard.start()

    threading.Thread(target=watch, name="tinkex-owner", daemon=True).start()


def _leave(order: Order) -> None:
    _clean_up(order)
    os._exit(1)


def _clean_up(order: Order) -> None:
    withdraw(Path(order.data_dir))
    if order.throwaway:
        shutil.rmtree(order.data_dir, ignore_errors=True)


def _take_stdout() -> IO[bytes]:
    """The way to the owner; what anything else prints goes to the log."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return reports


def _report(reports: IO[bytes], **what: object) -> None:
    try:
        reports.write(msgspec.json.encode(what) + b"\n")
    except OSError:
        logging.getLogger(__name__).debug("the owner does not read any more")
