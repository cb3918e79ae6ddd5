"""The low-rank products of one segment, on those of a pass's rows that are its own.

They only ever see these rows, so a segment's gradients do not depend on what else is in the
batch. They are written where the segment says, in the precision of the masters.

Shapes: T tokens of a pass, S of a segment, R rank, Z ranks of projections that share an input,
I inputs, O outputs of one projection, Y outputs of those that share an input, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tinkex.engine.lora.thin import expand_add_, shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.lora.weights import Group, LoraWeights
    from tinkex.engine.models.base import Projection


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that share an adapter; None is the base model itself.

    `gradient` is where the backward pass writes; without it the adapter gets no gradient.
    """

    start: int
    stop: int
    weights: LoraWeights | None
    gradient: LoraWeights | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The products of one segment that share an input.

    `factors` are in the activations' precision, `gradient` in that of the masters.
    """

    rows: slice
    scale: float
    factors: Group
    gradient: Group | None

    @property
    def learns(self) -> bool:
        """Whether it has a gradient."""
        return self.gradient is not None

    def add(self, x_TI: Tensor, y_TY: Tensor) -> Tensor:
        """Add the products to the piece's rows; return its inner activations."""
        z_SZ = shrink(x_TI[self.rows], self.factors.a_ZI)
        parts = self._parts(y_TY[self.rows], z_SZ)
        for (y_SO, z_SR), b_OR in zip(parts, self.factors.bs_OR, strict=True):
            expand_add_(y_SO, z_SR, b_OR, self.scale)
        return z_SZ

    def back(self, x_TI: Tensor, dy_TY: Tensor, z_SZ: Tensor | None, dx_TI: Tensor | None) -> None:
        """Write the gradient, and add to the slope by x; z is computed again if not given."""
        x_SI, dy_SY = x_TI[self.rows], dy_TY[self.rows]
        if z_SZ is None:
            z_SZ = torch.mm(x_SI, self.factors.a_ZI.T)
        dz_SZ = self._inner_slope(dy_SY, z_SZ)
        if dx_TI is not None:
            dx_TI[self.rows].addmm_(dz_SZ, self.factors.a_ZI)
        if self.gradient is not None:
            product_into(self.gradient.a_ZI, dz_SZ.T, x_SI)
            parts = self._parts(dy_SY, z_SZ)
            for (dy_SO, z_SR), b_OR in zip(parts, self.gradient.bs_OR, strict=True):
                product_into(b_OR, dy_SO.T, z_SR, scale=self.scale)

    def _inner_slope(self, dy_SY: Tensor, z_SZ: Tensor) -> Tensor:
        """The slope by the inner activations, with the scale in it."""
        dz_SZ = torch.empty_like(z_SZ)
        parts = self._parts(dy_SY, dz_SZ)
        for (dy_SO, dz_SR), b_OR in zip(parts, self.factors.bs_OR, strict=True):
            torch.addmm(dz_SR, dy_SO, b_OR, beta=0, alpha=self.scale, out=dz_SR)
        return dz_SZ

    def _parts(self, y_SY: Tensor, z_SZ: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of each projection, and the inner activations that belong to them."""
        bs_OR = self.factors.bs_OR
        if len(bs_OR) == 1:
            return iter(((y_SY, z_SZ),))
        widths, rank = [b_OR.shape[0] for b_OR in bs_OR], bs_OR[0].shape[1]
        ranks = [rank] * len(widths)
        return zip(
            y_SY.split_with_sizes(widths, dim=1), z_SZ.split_with_sizes(ranks, dim=1), strict=True
        )


def piece_of(segment: Segment, layer: int, names: tuple[Projection, ...]) -> Piece | None:
    """A segment's products at one place, or None when it has no adapter that covers it."""
    weights = segment.weights
    factors = None if weights is None else weights.group(layer, names)
    if weights is None or factors is None:
        return None
    gradient = None if segment.gradient is None else segment.gradient.group(layer, names)
    return Piece(slice(segment.start, segment.stop), weights.scale, factors, gradient)


def product_into(
    out: Tensor, left: Tensor, right: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """A product over tokens: many terms, so it comes in the precision of the masters.

    With `add` it is added to what is there.
    """
    if left.is_cuda and left.dtype != out.dtype:
        if add:
            out.add_(torch.mm(left, right, out_dtype=out.dtype), alpha=scale)
            return
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)
    else:
        left, right = left.to(out.dtype), right.to(out.dtype)
        torch.addmm(out, left, right, beta=float(add), alpha=scale, out=out)
