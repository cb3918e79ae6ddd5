"""The targets of some rows as a rectangle, which is what a gather and a scatter take.

Rows with fewer targets than the widest are filled up with token 0 at slope 0, which adds nothing.
Two operations never share a rectangle, except where every row has one target: a sum over a wider
row adds up in another order, and nobody's bits may depend on who is in the batch. Rectangles are
also bounded, since a row can have as many targets as the vocabulary has tokens.

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
        """Its own of these values, which there are one per target of all rows."""
        own = values_M[self.first : self.last]
        if self._places_M is None:
            return own.view(self._shape)
        rows, width = self._shape
        cells = own.new_zeros(rows * width)
        cells[self._places_M.to(own.device)] = own
        return cells.view(self._shape)

    def flat(self, values_BK: Tensor) -> Tensor:
        """The other way: values of its targets, one after the other."""
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
        # By the piece's own widest row, so that it is cut the same way in any company.
        rows = max(cells // max(max(counts[start:stop]), 1), 1)
        for row in range(start, stop, rows):
            own = counts[row : min(row + rows, stop)]
            yield Rectangle(row, own, first)
            first += sum(own)
