"""A frozen weight with its bias, and the products with it.

On a CPU in float32 there are two ways to multiply:

- *plain*: the library's product, bit for bit what `transformers` computes. Rows have the same
  bits for any number of them from `packing.MIN_ROWS` on.
- *packed*: oneDNN's product with a copy of the weight in the layout that its kernels read.
  Two to three times as fast for the few rows of decoding, and rows have the same bits
  whatever their number. It adds in another order, so it differs from plain by rounding.
  Calling it takes longer than multiplying with a small weight; those are multiplied plainly,
  in whole steps of four rows, which give a row the same bits whatever their number, too; few
  rows by numpy, if that gives the same bits on this machine: see `few_rows`.

Slopes by the input always take a packed copy of the transposed weight. Both copies are made
when they are first needed. Everywhere else both ways are the library's product.

Shapes: T rows, I inputs, O outputs of all the projections that the weight joins.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn import functional as F

from tinkex.engine.models.few_rows import FewRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ROW_STEP: Final = 4
"""Few rows are filled up to as many: see above."""
_SMALL: Final = 2**18
"""Weights of up to so many numbers are not worth packing."""


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
        exact = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
        self._packs = exact and torch.backends.mkldnn.is_available()
        self._steps = exact and weight_OI.numel() <= _SMALL
        self._weight_IO = weight_OI.T
        self.row_step = ROW_STEP if self._steps else 1
        """Packed products of whole steps of rows need not be filled up, from `ROW_STEP` rows on."""
        # Mutable state: the packed copies.
        self._packed: Tensor | None = None
        self._packed_transposed: Tensor | None = None

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

    @cached_property
    def few_rows(self) -> FewRows | None:
        """Packed products of few rows in whole steps, where there is a quicker way to them."""
        plain = self.bias_O is None and self._steps
        return FewRows.of(self.weight_OI) if plain else None

    def multiply(self, x_TI: Tensor, *, packed: bool = False) -> Tensor:
        """Return y_TO in fresh memory, outside autograd."""
        if packed and self._steps:
            return self._in_steps(x_TI)
        if self._steps or not (packed and self._packs):
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        if self._packed is None:
            self._packed = _pack(self.weight_OI)
        return _packed_product(x_TI, self._packed, self.bias_O)

    def _in_steps(self, x_TI: Tensor) -> Tensor:
        rows = x_TI.shape[0]
        if missing := -rows % ROW_STEP:
            x_TI = _filled_up(x_TI, missing)
        few = self.few_rows
        if few is not None and few.suits(x_TI.shape[0]):
            y_TO = torch.from_numpy(few(x_TI.numpy()))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        else:
            y_TO = F.linear(x_TI, self.weight_OI, self.bias_O)
        return y_TO[:rows] if missing else y_TO

    def into(self, x_TI: Tensor, room_TO: Tensor) -> Tensor:
        """The packed product of rows in whole steps, outside autograd; in `room_TO` if it can."""
        if not self._steps:
            return self.multiply(x_TI, packed=True)
        if self.bias_O is None:
            return torch.mm(x_TI, self._weight_IO, out=room_TO)
        return torch.addmm(self.bias_O, x_TI, self._weight_IO, out=room_TO)

    def slope(self, dy_TO: Tensor, out: Tensor | None = None) -> Tensor:
        """Return dx_TI, the slope by x, given that by y; in fresh memory or in `out`."""
        if not self._packs:
            return torch.mm(dy_TO, self.weight_OI, out=out)
        if self._packed_transposed is None:
            self._packed_transposed = _pack(self.weight_OI.T)
        dx_TI = _packed_product(dy_TO, self._packed_transposed, None)
        return dx_TI if out is None else out.copy_(dx_TI)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: Linear, x_TI: Tensor, packed: bool) -> Tensor:
        ctx.linear = linear
        return linear.multiply(x_TI, packed=packed)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.linear.slope(slopes[0]), None


def _pack(weight_OI: Tensor) -> Tensor:
    # No number of rows is named: the layout shall suit any.
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)


def _packed_product(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    rows = x_TI.shape[0]
    # Naming the overload saves looking for it in every layer.
    product = torch.ops.mkldnn._linear_pointwise.default
    if rows >= ROW_STEP:
        return product(x_TI, packed, bias_O, "none", [], "")
    # A lone row would take a kernel that adds in another order, and four take less time than
    # two or three.
    return product(_filled_up(x_TI, ROW_STEP - rows), packed, bias_O, "none", [], "")[:rows]


def _filled_up(x_TI: Tensor, more: int) -> Tensor:
    if not more:
        return x_TI
    return x_TI.expand(1 + more, -1) if x_TI.shape[0] == 1 else F.pad(x_TI, (0, 0, 0, more))
