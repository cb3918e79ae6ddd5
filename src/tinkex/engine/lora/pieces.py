"""The low-rank products of one segment that share an input.

Shapes: S tokens, R rank, Z ranks of projections that share an input, O outputs of one projection,
Y outputs of those that share an input, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.lora.weights import Group


@dataclass(frozen=True, slots=True)
class Piece:
    """The low-rank products of one segment that share an input.

    `factors` are in the activations' precision, `gradient` in that of the masters.
    """

    rows: slice
    scale: float
    factors: Group
    gradient: Group | None

    def parts(self, y_SY: Tensor, z_SZ: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of each projection, and the inner activations that belong to them."""
        bs_OR = self.factors.bs_OR
        if len(bs_OR) == 1:
            return iter(((y_SY, z_SZ),))
        widths, rank = [b_OR.shape[0] for b_OR in bs_OR], bs_OR[0].shape[1]
        ranks = [rank] * len(widths)
        return zip(
            y_SY.split_with_sizes(widths, dim=1), z_SZ.split_with_sizes(ranks, dim=1), strict=True
        )
