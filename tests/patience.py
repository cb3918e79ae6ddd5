"""How long tests wait for something that must come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

PATIENCE_S: Final = 240.0
"""Some of it takes milliseconds on a quiet machine; a busy one may need a hundred times as long.

Less than pytest's own limit in `pyproject.toml`, so that a test fails where it waits.
"""


def until(condition: Callable[[], T], what: str = "it did not come about") -> T:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        # Other processes, which bring it about, need the processor.
        time.sleep(0.05)
    return found
