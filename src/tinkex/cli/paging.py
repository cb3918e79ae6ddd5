"""Walking through lists that come in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinkex.types import Cursor


class Page(Protocol):
    """An answer that says where in the list it lies."""

    @property
    def cursor(self) -> Cursor | None: ...


PageT = TypeVar("PageT", bound=Page)
T = TypeVar("T")


def every_page(
    fetch: Callable[[int, int], PageT],
    items: Callable[[PageT], Sequence[T]],
    limit: int,
    page_size: int,
) -> Iterator[T]:
    """The first `limit` items (0: all) of a list, fetched as `fetch(limit, offset)`."""
    left, offset = limit or None, 0
    while left is None or left > 0:
        page = fetch(page_size if left is None else min(page_size, left), offset)
        found = items(page)
        yield from found[:left]
        offset += len(found)
        left = None if left is None else left - len(found)
        # An empty page ends it, whatever the server says the total is.
        if not found or page.cursor is None or offset >= page.cursor.total_count:
            return
