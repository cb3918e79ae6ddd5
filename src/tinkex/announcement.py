"""How the processes of one program find its embedded server: a file that only its owner can read.

The server writes the file when it is ready and removes it when it ends. `TINKEX_EMBEDDED_SERVER`
names the folder in the environment of child processes; the key is only in the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

_FILE = "server.json"


class Announcement(msgspec.Struct, frozen=True):
    """A running server."""

    url: str
    key: str
    models: tuple[str, ...]
    pid: int

    def __repr__(self) -> str:
        return f"Announcement({self.url})"


def announce(folder: Path, announcement: Announcement) -> None:
    """Write the file atomically."""
    from tinkex.new_files import replacing  # only servers pay for it

    with replacing(folder / _FILE, mode=0o600) as file:
        file.write(msgspec.json.encode(announcement))


def withdraw(folder: Path) -> None:
    """Remove the file."""
    with suppress(OSError):
        (folder / _FILE).unlink()


def announced(folder: str | None) -> Announcement | None:
    """The server of a folder; None where there is none, or where another user owns the file."""
    if not folder:
        return None
    try:
        with (Path(folder) / _FILE).open("rb") as file:
            mine = os.fstat(file.fileno()).st_uid == os.getuid()
            return msgspec.json.decode(file.read(), type=Announcement) if mine else None
    except (OSError, msgspec.MsgspecError):
        return None
