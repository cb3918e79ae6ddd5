"""A bounded memory of what the database holds anyway."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V = TypeVar("V")


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
            _, oldest = self._values.popitem(last=False)
            self._bytes -= self._size(oldest)

    def discard(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= self._size(value)

    def items(self) -> Iterator[tuple[str, V]]:
        """A copy of the entries, so that they may be changed on the way."""
        return iter(list(self._values.items()))
