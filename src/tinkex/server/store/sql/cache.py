"""Copies of records in memory, with a limit; among nodes only while changes are heard of."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinkex.clock import Clock

V = TypeVar("V")

OLDEST_S: Final = 5.0
"""After this a copy is read again, so that a lost hint does little harm."""


def _weightless(value: object) -> int:
    return 0


class Cache(Generic[V]):
    """Values by id; the one that was used longest ago goes first."""

    def __init__(
        self, most: int, most_bytes: int = 1, size: Callable[[V], int] = _weightless
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._size = size
        # Mutable state: the values, last used last, and their size.
        self._values: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: str, value: V) -> None:
        self.discard(key)
        self._values[key] = value
        self._bytes += self._size(value)
        while len(self._values) > self._most or self._bytes > self._most_bytes:
            self.discard(next(iter(self._values)))

    def discard(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= self._size(value)

    def items(self) -> Iterator[tuple[str, V]]:
        """A copy of the entries, so that they may be changed during iteration."""
        return iter(list(self._values.items()))


class SharedCache(Cache[V]):
    """Copies of records that other nodes change, too.

    On a server that is no node it is a plain cache. On a node it holds nothing while no hints are
    heard, and nothing for longer than `OLDEST_S`. A hint may arrive between the read of a record
    and the moment the copy is kept: `version` is read before the record and given to `put`.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        # Mutable state: the clock, on a node; whether hints are heard; when each copy was read;
        # how many hints there were.
        self._clock: Clock | None = None
        self._hearing = True
        self._read_at: dict[str, float] = {}
        self.version = 0

    def share(self, clock: Clock) -> None:
        """Hold nothing, until hints are heard."""
        self._clock = clock
        self.hear(False)

    def hear(self, hearing: bool) -> None:
        """Note whether hints are heard from now on; what is held may be old."""
        self._hearing = hearing
        self.version += 1
        for key, _ in self.items():
            self.discard(key)

    def invalidate(self, key: str) -> None:
        """Forget a copy, because the record was changed."""
        self.version += 1
        self.discard(key)

    def get(self, key: str) -> V | None:
        if self._clock is not None and self._clock.now() > self._read_at.get(key, 0.0) + OLDEST_S:
            self.discard(key)
        return super().get(key)

    def put(self, key: str, value: V, version: int | None = None) -> None:
        """Keep a copy, unless a hint came after `version`."""
        if self._clock is None:
            super().put(key, value)
        elif self._hearing and version in (None, self.version):
            super().put(key, value)
            self._read_at[key] = self._clock.now()

    def amend(self, key: str, value: V) -> None:
        """Change a copy that is held; it is no newer than before."""
        if self.get(key) is not None:
            at = self._read_at.get(key)
            super().put(key, value)
            if at is not None:
                self._read_at[key] = at

    def discard(self, key: str) -> None:
        super().discard(key)
        self._read_at.pop(key, None)
