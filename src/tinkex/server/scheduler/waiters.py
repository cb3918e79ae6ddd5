"""Wakes long-polls: whoever waits for a key is woken when somebody rings it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import anyio

from tinkex.clock import time_limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from tinkex.clock import Clock

T = TypeVar("T")


class Waiters:
    """Waits on events, never by asking again and again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Mutable state: per key, one event for everybody who waits for it now.
        self._bells: dict[Hashable, anyio.Event] = {}
        self._listeners: dict[Hashable, int] = defaultdict(int)
        self._closed = False

    def close(self) -> None:
        """Let everybody go: the server ends, and nobody waits for it from now on."""
        self._closed = True
        for bell in self._bells.values():
            bell.set()

    def ring(self, key: Hashable) -> None:
        """Wake everybody who waits for a key."""
        bell = self._bells.pop(key, None)
        if bell is not None:
            bell.set()

    async def until(
        self, key: Hashable, look: Callable[[], Awaitable[T | None]], timeout_s: float
    ) -> T | None:
        """What `look` finds, asked now and after each ring; None after `timeout_s`."""
        # The first look needs no timer: most polls of a busy server find their result at once.
        found = await look()
        if found is not None or timeout_s <= 0 or self._closed:
            return found
        self._listeners[key] += 1
        try:
            async with time_limit(self._clock, timeout_s):
                while found is None and not self._closed:
                    # Taken before looking, so a ring in between is not missed.
                    bell = self._bells.setdefault(key, anyio.Event())
                    found = await look()
                    if found is None:
                        await bell.wait()
        finally:
            self._leave(key)
        return found

    def _leave(self, key: Hashable) -> None:
        self._listeners[key] -= 1
        if not self._listeners[key]:
            del self._listeners[key]
            self._bells.pop(key, None)
