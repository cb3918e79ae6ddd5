"""Full disks: said with the place, what is needed and what is free."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tinkex.cli.failures import CommandError
from tinkex.cli.output import size
from tinkex.engine.checkpoints.storage import free_bytes, full_disk
from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

WORK_PREFIX: Final = ".tinkex-download-"
"""How the names of folders begin that hold what is not finished."""
_HINT: Final = "Nothing was saved. Free some space there, or choose another place with -o."


@contextmanager
def writing_into(folder: Path, needed_bytes: int | None = None) -> Generator[None]:
    """Write files into a folder; raises a `CommandError` where they do not fit.

    What is known not to fit is refused before anything is written.
    """
    free = free_bytes(folder)
    if needed_bytes is not None and free is not None and needed_bytes > free:
        raise _no_room(folder, "not enough space", needed_bytes, free)
    try:
        yield
    except CommandError:
        raise  # it says already what is wrong
    except Exception as error:
        reason = full_disk(error)
        if reason is None:
            raise
        place = error.path if isinstance(error, StorageError) else None
        raise _no_room(place or folder, reason, needed_bytes, free) from error


def _no_room(
    place: Path | str, reason: str, needed_bytes: int | None, free: int | None
) -> CommandError:
    sizes = [
        *([] if needed_bytes is None else [f"{size(needed_bytes)} needed"]),
        *([] if free is None else [f"{size(free)} free"]),
    ]
    shown = str(place).partition(f"/{WORK_PREFIX}")[0]
    about = f" ({', '.join(sizes)})" if sizes else ""
    return CommandError(f"Cannot write to {shown}: {reason}{about}", _HINT)
