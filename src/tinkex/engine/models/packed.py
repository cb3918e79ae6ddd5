"""Products with a frozen float32 weight on a CPU that give a row the same bits in any company.

There are three ways, the first that a machine has is taken for a weight:

- *native*: machine code of our own, for processors with AVX-512. It reads a copy of the weight as
  fast as memory gives it, and writes where it is told.
- *oneDNN*: the library's product with a copy of the weight in the layout that its kernels read.
  Calling it takes longer than multiplying with a small weight.
- *stepped*: the library's plain product, in whole steps of four rows. It brings the weight into
  another order at every call.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from tinkex.engine.native import NativeProduct

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ROW_STEP: Final = 4
"""The fewest rows of a product; some have whole steps of as many."""
_SMALL: Final = 2**18
"""Weights of up to so many numbers are not worth packing for oneDNN."""


class PackedProduct(Protocol):
    """`x @ W.T` for at least `ROW_STEP` rows, and whole steps of `row_step`."""

    row_step: int

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        ...

    def bound(self, x_TI: Tensor, y_TO: Tensor) -> Callable[[], object]:
        """What writes the product with whatever is in `x` to `y` when it is called."""
        ...


def packed_product(weight_OI: Tensor) -> PackedProduct:
    """The best way to multiply with a float32 weight on this machine."""
    native = NativeProduct.of(weight_OI)
    if native is not None:
        return native
    if weight_OI.numel() > _SMALL and torch.backends.mkldnn.is_available():
        return OneDnnProduct(weight_OI)
    return SteppedProduct(weight_OI)


class OneDnnProduct:
    """oneDNN's product with a copy of the weight."""

    row_step = 1

    def __init__(self, weight_OI: Tensor) -> None:
        # No number of rows is named: the layout shall suit any.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product; `out` gets a copy."""
        # Naming the overload saves looking for it in every layer.
        product = torch.ops.mkldnn._linear_pointwise.default
        y_TO = product(x_TI, self._packed, None, "none", [], "")
        return y_TO if out is None else out.copy_(y_TO)

    def bound(self, x_TI: Tensor, y_TO: Tensor) -> Callable[[], object]:
        """The product of the same tensors at every call."""
        return lambda: self(x_TI, y_TO)


class SteppedProduct:
    """The library's product."""

    row_step = ROW_STEP

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_IO = weight_OI.T

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product of whole steps of rows."""
        return torch.mm(x_TI, self._weight_IO, out=out)

    def bound(self, x_TI: Tensor, y_TO: Tensor) -> Callable[[], object]:
        """The product of the same tensors at every call."""
        return lambda: self(x_TI, y_TO)
