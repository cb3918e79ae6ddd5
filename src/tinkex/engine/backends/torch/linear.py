"""A frozen weight with its bias, and the products with it.

On a CPU in float32 there are two kinds of product:

- *plain*: `F.linear`, bit for bit what `transformers` computes. A row's bits do not depend on the
  number of rows from `MIN_ROWS` rows on.
- *batch-invariant*: faster, above all for the few rows of decoding, and a row's bits never depend
  on the other rows: see `batch_invariant`. It sums in another order, so it differs from plain by
  rounding. The bias is added elementwise afterwards.

Gradients by the input are batch-invariant products with the transposed weight. Copies of the weight
in the layout of these products are made on first use. On other devices and in other precisions both
kinds are the library's product.

Shapes: T rows, I inputs, O outputs of all the projections that the weight joins.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.batch_invariant import ROW_STEP, invariant_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.backends.torch.batch_invariant import InvariantProduct


MIN_ROWS: Final = 16
"""Products of fewer rows use other matrix kernels, whose results differ in the last bits."""


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
        self._has_invariant = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32

    @cached_property
    def _invariant(self) -> InvariantProduct:
        return invariant_product(self.weight_OI)

    @cached_property
    def _invariant_transposed(self) -> InvariantProduct:
        return invariant_product(self.weight_OI.T)

    def split(self, y_TO: Tensor) -> tuple[Tensor, ...]:
        """Views of the joined outputs, one per projection."""
        if len(self.widths) == 1:
            return (y_TO,)
        return y_TO.split_with_sizes(self.widths, dim=1)

    def multiply(self, x_TI: Tensor, *, batch_invariant: bool = False) -> Tensor:
        """Return y_TO in new memory, outside autograd."""
        if not (batch_invariant and self._has_invariant):
            return F.linear(x_TI, self.weight_OI, self.bias_O)
        y_TO = _padded(self._invariant, x_TI)
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    def input_gradient(self, dy_TO: Tensor, out: Tensor | None = None) -> Tensor:
        """Return dx_TI, the gradient by x, given that by y; in new memory or in `out`."""
        if not self._has_invariant:
            return torch.mm(dy_TO, self.weight_OI, out=out)
        return _padded(self._invariant_transposed, dy_TO, out)


def _padded(product: InvariantProduct, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
    """A product of any number of rows, padded to what the product takes."""
    rows = x_TI.shape[0]
    padding = ROW_STEP - rows if rows < ROW_STEP else -rows % product.row_step
    if not padding:
        return product(x_TI, out)
    x_TI = x_TI.expand(1 + padding, -1) if rows == 1 else F.pad(x_TI, (0, 0, 0, padding))
    y_TO = product(x_TI)[:rows]
    return y_TO if out is None else out.copy_(y_TO)
