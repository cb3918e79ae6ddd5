"""Downloading from signed links: plain requests, no credentials, whole files only."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from tinkex.cli.disk_space import writing_into
from tinkex.cli.failures import CommandError
from tinkex.cli.output import size
from tinkex.new_files import new_file

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_SCHEMES = ("http://", "https://")


def fetch(url: str, target: Path, label: str) -> int:
    """Download to `target`, which is there completely or not at all; returns its size."""
    if not url.startswith(_SCHEMES):
        raise CommandError(f"The server gave a link that is no web address for {label}")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = new_file(target.parent, f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            received = _receive(url, file, target.parent, label)
        part.replace(target)
    except BaseException:
        part.unlink()
        raise
    return received


def _receive(url: str, file: BinaryIO, folder: Path, label: str) -> int:
    received, expected = 0, None
    progress = _Progress(label)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            length = reply.headers.get("Content-Length", "")
            expected = int(length) if length.isdigit() else None
            with writing_into(folder, expected):
                while chunk := reply.read(_CHUNK):
                    file.write(chunk)
                    received += len(chunk)
                    progress.show(received, expected)
                file.flush()
    except urllib.error.HTTPError as error:
        raise CommandError(
            f"Could not download {label}: the server answered {error.code} {error.reason}",
            "The link may have expired; run the command again.",
        ) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise CommandError(
            f"Could not download {label}: {reason}", "Check the network and run the command again."
        ) from error
    finally:
        progress.end()
    if expected is not None and received != expected:
        raise CommandError(
            f"The download of {label} broke off after {size(received)} of {size(expected)}",
            "Run the command again.",
        )
    return received


class _Progress:
    """One line on a terminal, written over and over; silent elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._on = sys.stderr.isatty()

    def show(self, received: int, expected: int | None) -> None:
        if not self._on:
            return
        share = f"{100 * received // expected:3d} % of {size(expected)}" if expected else ""
        line = f"{self._label}: {size(received)} {share}"
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
