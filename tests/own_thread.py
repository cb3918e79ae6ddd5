"""What a test does itself: a client that another test left open works in a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    import pytest

T = TypeVar("T")


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged in this thread."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]


def in_own_thread(listener: Callable[[T], object]) -> Callable[[T], None]:
    """A listener that leaves out what it is called with in other threads than this one."""
    own = threading.get_ident()

    def hear(event: T) -> None:
        if threading.get_ident() == own:
            listener(event)

    return hear
