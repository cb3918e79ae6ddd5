"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file to write, which takes the place of `path` when the body ends without an error.

    It is on the disk before it does so.
    """
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _umask() -> int:
    """The process's mask for new files; reading it means setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
