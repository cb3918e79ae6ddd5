"""A frozen weight with its bias, and the products with it.

On a CPU in float32 there are two ways to multiply:

- *plain*: the library's product, bit for bit what `transformers` computes. Rows have the same
  bits for any number of them from `MIN_ROWS` on.
- *packed*: faster, most of all for the few rows of decoding, and rows have the same bits whatever
  their number: see `packed`. It adds in another order, so it differs from plain by rounding.

A bias is added to a packed product afterwards, number by number, which rounds the same way for any
number of rows.

Slopes by the input are packed products with the transposed weight. The copies of the weight that
this takes are made when they are first needed. Everywhere else both ways are the library's
product.

Shapes: T rows, I inputs, O outputs of all the projections that the weight joins.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.packed import ROW_STEP, packed_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.backends.torch.packed import PackedProduct


MIN_ROWS: Final = 16
"""Fewer rows than this take other matrix kernels, whose results differ in the last bits."""


class Linear:
    """`x @ W.T + b` for a weight that no longer changes.

    `widths` says how many outputs belong to each of the projections whose rows are joined.
    """

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, widths: Sequence[int] | None = None
    ) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.widths = tuple(widths or weight_OI.shape[:1])
        self._packs = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32

    @cached_property
    def _packed(self) -> PackedProduct:
        return packed_product(self.weight_OI)

    @cached_property
    def _packed_transposed(self) -> PackedProduct:
        return packed_product(self.weight_OI.T)

    def __call__(self, x_TI: Tensor, *, packed: bool = False) -> Tensor:
        """Return y_TO, differentiable by x."""
        if torch.is_grad_enabled() and x_TI.requires_grad:
            return cast("Tensor", _Product.apply(self, x_TI, packed))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        return self.multiply(x_TI, packed=packed)

    def split(self, y_TO: Tensor) -> tuple[Tensor, ...]:
        """See the joined outputs as those of each projection."""
        if len(self.widths) == 1:
            return (y_TO,)
        return y_TO.split_with_sizes(self.widths, dim=1)

    def multiply(self, x_TI: Tensor, *, packed: bool = False) -> Tensor:
        """Return y_TO in fresh memory, outside autograd."""
        if not (packed and self._packs):
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        y_TO = _filled_up(self._packed, x_TI)
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    def slope(self, dy_TO: Tensor, out: Tensor | None = None) -> Tensor:
        """Return dx_TI, the slope by x, given that by y; in fresh memory or in `out`."""
        if not self._packs:
            return torch.mm(dy_TO, self.weight_OI, out=out)
        return _filled_up(self._packed_transposed, dy_TO, out)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: Linear, x_TI: Tensor, packed: bool) -> Tensor:
        ctx.linear = linear
        return linear.multiply(x_TI, packed=packed)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.linear.slope(slopes[0]), None


def _filled_up(product: PackedProduct, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
    """A product of any number of rows."""
    rows = x_TI.shape[0]
    missing = ROW_STEP - rows if rows < ROW_STEP else -rows % product.row_step
    if not missing:
        return product(x_TI, out)
    x_TI = x_TI.expand(1 + missing, -1) if rows == 1 else F.pad(x_TI, (0, 0, 0, missing))
    y_TO = product(x_TI)[:rows]
    return y_TO if out is None else out.copy_(y_TO)
