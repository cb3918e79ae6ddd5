"""How the processes of one program find its embedded server: a file that only its owner reads.

The server writes it when it can work and removes it when it ends. Its folder is named by
`TINKEX_EMBEDDED_SERVER` in the environment of the program's children; the key is not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

_FILE = "server.json"


class Announcement(msgspec.Struct, frozen=True):
    """A server that runs."""

    url: str
    key: str
    models: tuple[str, ...]
    pid: int

    def __repr__(self) -> str:
        return f"Announcement({self.url})"


def announce(folder: Path, announcement: Announcement) -> None:
    """Write the file, whole or not at all."""
    fresh = folder / f"{_FILE}.new"
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(announcement))
    fresh.replace(folder / _FILE)


def withdraw(folder: Path) -> None:
    """Remove the file."""
    with suppress(OSError):
        (folder / _FILE).unlink()


def announced(folder: str | None) -> Announcement | None:
    """The server of a folder; None where there is none, or where the file is not one's own."""
    if not folder:
        return None
    try:
        with (Path(folder) / _FILE).open("rb") as file:
            mine = os.fstat(file.fileno()).st_uid == os.getuid()
            return msgspec.json.decode(file.read(), type=Announcement) if mine else None
    except (OSError, msgspec.MsgspecError):
        return None
