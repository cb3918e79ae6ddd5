"""The library's log lines on standard error, and which of them a person has read."""

from __future__ import annotations

import logging
import sys


class _Shown(logging.Handler):
    """Prints records and keeps their messages."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        # Mutable state: what was printed.
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody reads standard error any more
            return
        self.messages.append(record.getMessage())


def show_log(level: int) -> None:
    """Print log lines from this level on; called again, it only changes the level."""
    root = logging.getLogger()
    root.setLevel(level)
    if not any(isinstance(handler, _Shown) for handler in root.handlers):
        root.addHandler(_Shown())


def was_shown(text: str) -> bool:
    """Whether a log line that was printed has this text in it."""
    shown = (handler for handler in logging.getLogger().handlers if isinstance(handler, _Shown))
    return any(text in message for handler in shown for message in handler.messages)
