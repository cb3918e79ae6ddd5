"""What a server process asks of the system and the interpreter before it takes requests."""

from __future__ import annotations

import gc
import resource
from contextlib import suppress

_OPEN_FILES = 65_536
# Of the default 700, almost all are still in use: every request makes a few hundred objects.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


def raise_file_limit() -> None:
    """Have as many open connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _OPEN_FILES if hard == unlimited else min(_OPEN_FILES, hard)
    if soft != unlimited and soft < wanted:
        # Some systems allow less than they say.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Everything is loaded: what lives for good need not be looked at for garbage ever again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
