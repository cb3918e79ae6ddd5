"""The seam between the engine and wherever saved adapters lie.

A location is a name that somebody else made up, never a path: `file_name` turns it into one that
cannot leave its folder. `FolderFiles` and `RemoteFiles` implement the protocol; what both must do
is in tests/contracts/saved_suite.py. Calls block, and are made on the engine's file threads.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

# File systems take 255 bytes; some of them are for a version and a suffix.
_LONGEST: Final = 180
_KEPT: Final = 100
SUFFIX: Final = ".safetensors"


class SavedFiles(Protocol):
    """Files by location. What storage does not allow raises `StorageError`.

    Calls for one location are never made concurrently; calls for different ones are.
    """

    def put(self, location: str, write: Callable[[Path], object], needed_bytes: int) -> int:
        """Have `write(path)` make a file and keep it; complete and durable when it returns.

        Returns its size. When it fails, what was at the location before still is.
        """
        ...

    def open(self, location: str) -> AbstractContextManager[Path]:
        """The file for as long as the block lasts; raises `FileNotFoundError`."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy a file, whole or not at all; raises `FileNotFoundError`."""
        ...

    def delete(self, location: str) -> None:
        """Delete a file; unknown locations are fine."""
        ...

    def close(self) -> None:
        """Remove what was only needed while it was open."""
        ...


def file_name(location: str) -> str:
    """The name of a location's file: no separators, no leading dot, no two alike."""
    quoted = quote(location, safe="").replace(".", "%2E")
    # Quoting never makes an equals sign, so no other location has such a name.
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_KEPT]}={sha256(location.encode()).hexdigest()}"
    return f"{quoted or '='}{SUFFIX}"
