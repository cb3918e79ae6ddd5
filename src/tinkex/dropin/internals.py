"""Names from inside the official package that scripts import, and that tinkex itself needs not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum


class QueueState(StrEnum):
    """What the server says about its queue; equal to the plain strings tinkex passes around."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"


class QueueStateObserver(ABC):
    """Something that is told when the queue pauses or moves again."""

    @abstractmethod
    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called on every change."""


def is_retryable_status_code(status_code: int) -> bool:
    """Whether a request answered with this status is worth sending again."""
    return status_code in (408, 409, 429) or 500 <= status_code < 600
