"""`RetryConfig`: how patient a sampling client is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from tinkex.clients.arguments import switch, whole_number
from tinkex.errors import APIConnectionError, InputError, InputTypeError, PromiseLostError


@dataclass(unsafe_hash=True)
class RetryConfig:
    """Settings of a sampling client's retries, with the official fields and defaults.

    `max_connections` is replaced by the server's own limit. `progress_timeout` is the longest
    time, in seconds, without any sample of the client finishing.
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        PromiseLostError,
    )

    def __post_init__(self) -> None:
        if (
            self.max_connections is not None
            and whole_number(self.max_connections, "max_connections") <= 0
        ):
            raise InputError("must be positive, or None for no limit", "max_connections")
        for name in ("progress_timeout", "retry_delay_base", "retry_delay_max", "jitter_factor"):
            _check_amount(getattr(self, name), name)
        switch(self.enable_retry_logic, "enable_retry_logic")
        switch(self.enable_stuck_detection, "enable_stuck_detection")
        if not _are_exceptions(self.retryable_exceptions):
            raise InputTypeError("must be a tuple of exception classes", "retryable_exceptions")

    def delay_s(self, attempt: int, draw: float) -> float:
        """The wait before retry number `attempt` (from 0); `draw` is uniform in [0, 1)."""
        delay = min(self.retry_delay_base * 2.0 ** min(attempt, 30), self.retry_delay_max)
        jitter = delay * self.jitter_factor * (2.0 * draw - 1.0)
        return min(max(delay + jitter, 0.0), self.retry_delay_max)


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """A `RetryConfig` together with what the server's flags say; see `futures.lifecycle`."""

    config: RetryConfig
    retries: bool
    patience_s: float

    @property
    def retryable_exceptions(self) -> tuple[type[Exception], ...]:
        """What else is worth another try, in the user's eyes."""
        return self.config.retryable_exceptions

    def delay_s(self, attempt: int, draw: float) -> float:
        """The wait before retry number `attempt`."""
        return self.config.delay_s(attempt, draw)


def _check_amount(value: object, name: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputTypeError(f"must be a number, not {type(value).__name__}", name)
    if not (value >= 0 and math.isfinite(value)):
        raise InputError("must be finite and not negative", name)


def _are_exceptions(kinds: object) -> bool:
    return isinstance(kinds, tuple) and all(
        isinstance(kind, type) and issubclass(kind, Exception)
        for kind in cast("tuple[object, ...]", kinds)
    )
