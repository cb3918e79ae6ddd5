"""Two growing texts in adjacent columns: a row is printed when neither can change it any more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinkex.tracking.layout import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_BETWEEN = " | "
_NARROWEST = 10
# A word with the spaces before it.
_WORD = re.compile(r" *[^ ]+| +")


class TextColumns:
    """Takes pieces of both texts and returns the rows that are complete."""

    def __init__(self, width: int) -> None:
        self.column = max((width - len(_BETWEEN)) // 2, _NARROWEST)
        # Mutable state: both texts, whether they have ended, and how many rows were returned.
        self._texts = ["", ""]
        self._ended = [False, False]
        self._shown = 0

    def grow(self, side: int, piece: str) -> list[str]:
        """Append a piece to one text."""
        self._texts[side] += piece.expandtabs(4)
        return self._complete()

    def end(self, side: int) -> list[str]:
        """Mark one text as complete."""
        self._ended[side] = True
        self._texts[side] = self._texts[side].rstrip()
        return self._complete()

    def _complete(self) -> list[str]:
        left, right = sides = [wrap(text, self.column) for text in self._texts]
        # The last row of a text that still grows may change.
        safe = [len(rows) - 1 for rows, ended in zip(sides, self._ended, strict=True) if not ended]
        until = min(safe) if safe else max(map(len, sides))
        new = range(self._shown, until)
        self._shown = max(self._shown, until)
        return [_row(left[i : i + 1], right[i : i + 1], self.column) for i in new]


def heading(left: str, right: str, width: int) -> list[str]:
    """The names above the columns, and a line below them."""
    columns = TextColumns(width)
    rows = [*columns.grow(0, left), *columns.end(0), *columns.grow(1, right), *columns.end(1)]
    rule = "-" * columns.column
    return [*rows, f"{rule}-+-{rule}"]


def wrap(text: str, width: int) -> list[str]:
    """Rows of at most `width` cells. When the text grows, only its last row can change."""
    return [row for line in text.split("\n") for row in _wrap_line(line, width)]


def _wrap_line(line: str, width: int) -> Iterator[str]:
    row = ""
    for word in _WORD.findall(line):
        if columns_of(row) + columns_of(word) <= width:
            row += word
            continue
        if row:
            yield row.rstrip()
        row = word.lstrip(" ")
        while columns_of(row) > width:
            head = _head(row, width)
            yield head
            row = row[len(head) :]
    yield row


def _head(word: str, width: int) -> str:
    """As much of a word as fits, one character at least."""
    end = 1
    while columns_of(word[: end + 1]) <= width:
        end += 1
    return word[:end]


def _row(left: list[str], right: list[str], column: int) -> str:
    first, second = "".join(left), "".join(right)
    return f"{first}{' ' * (column - columns_of(first))}{_BETWEEN}{second}".rstrip()
