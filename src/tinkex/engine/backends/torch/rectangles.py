"""The targets of some rows as a rectangle, the shape that a gather and a scatter need.

Rows with fewer targets than the widest are padded with token 0 at gradient 0, which adds nothing.
Two operations share a rectangle only where every row has one target: the width of a row decides the
order of its sum, and an operation's bits must not depend on the rest of the batch. Rectangles are
bounded, because a row can have as many targets as the vocabulary has tokens.

Shapes: B rows of a rectangle, K targets of its widest row, M targets of all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

CELLS: Final = 2**20
"""Most cells of a rectangle, unless one row alone has more."""


class Rectangle:
    """Rows `start` to `stop` of a chunk, whose targets are `first` to `last` of all."""

    def __init__(self, start: int, counts: Sequence[int], first: int) -> None:
        self.start = start
        self.stop = start + len(counts)
        self.first = first
        self.last = first + sum(counts)
        self._shape = len(counts), max(counts)
        self._places_M: Tensor | None = None
        if min(counts) < max(counts):
            cells_BK = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            self._places_M = cells_BK.flatten().nonzero()[:, 0]

    def filled(self, values_M: Tensor) -> Tensor:
        """This rectangle's part of the values, of which there is one per target of all rows."""
        own = values_M[self.first : self.last]
        if self._places_M is None:
            return own.view(self._shape)
        rows, width = self._shape
        cells = own.new_zeros(rows * width)
        cells[self._places_M.to(own.device)] = own
        return cells.view(self._shape)

    def flat(self, values_BK: Tensor) -> Tensor:
        """The inverse of `filled`: the values of its targets, concatenated."""
        cells = values_BK.flatten()
        return cells if self._places_M is None else cells[self._places_M.to(cells.device)]


def rectangles(
    pieces: Sequence[tuple[int, int]], counts: Sequence[int], first: int, cells: int = CELLS
) -> Iterator[Rectangle]:
    """Cover the rows of a chunk, given as (start, stop) of each operation's.

    `counts` are the targets of its rows, of which the first is `first`.
    """
    if min(counts) == max(counts) == 1:
        pieces = [(pieces[0][0], pieces[-1][1])]
    for start, stop in pieces:
        # By the piece's own widest row, so that its cuts do not depend on the other pieces.
        rows = max(cells // max(max(counts[start:stop]), 1), 1)
        for row in range(start, stop, rows):
            own = counts[row : min(row + rows, stop)]
            yield Rectangle(row, own, first)
            first += sum(own)
