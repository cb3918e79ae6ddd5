"""Batch-invariant products with a frozen float32 weight on a CPU.

A row of such a product has the same bits whatever other rows are in the batch. There are several
kinds; the first one that this machine has and that passes a trial is used (see `row_trial`). The
last one needs no trial.

- *oneDNN*: its product with a copy of the weight in the layout that its kernels read. The call
  itself takes longer than a product with a small weight.
- *stepped*: `torch.mm` on multiples of four rows. It reorders the weight at every call.
- *blocks*: `torch.mm` with a constant number of rows, padded with zeros; in the end one row at a
  time. It reads the weight once for every block.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from tinkex.engine.backends.torch.row_trial import random_rows, rows_agree, same_bits, trial_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_log = logging.getLogger(__name__)

ROW_STEP: Final = 4
"""The fewest rows of a product; some kinds take multiples of it only."""
_SMALL: Final = 2**18
"""Weights of up to this many elements are not worth packing for oneDNN."""


class InvariantProduct(Protocol):
    """`x @ W.T` for at least `ROW_STEP` rows and a multiple of `row_step` rows."""

    row_step: int

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in new memory or in `out`."""
        ...


class ProductKind(NamedTuple):
    """A kind of product; `make` returns None for a weight or machine that it does not support."""

    name: str
    make: Callable[[Tensor], InvariantProduct | None]


def invariant_product(weight_OI: Tensor) -> InvariantProduct:
    """The fastest batch-invariant product with a float32 weight on this machine."""
    return first_that_passes(weight_OI, _KINDS)[1]


def first_that_passes(
    weight_OI: Tensor, kinds: Sequence[ProductKind]
) -> tuple[ProductKind, InvariantProduct]:
    """The first kind that passes its trial here, and the product with this weight."""
    for kind in kinds:
        product = _tried(kind, weight_OI)
        if product is not None:
            return kind, product
    return _ONE_BY_ONE, BlockProduct(weight_OI, 1)


class _Case(NamedTuple):
    """What the libraries choose their kernels by, within one process."""

    kind: ProductKind
    shape: torch.Size
    contiguous: bool
    threads: int


def _tried(kind: ProductKind, weight_OI: Tensor) -> InvariantProduct | None:
    case = _Case(kind, weight_OI.shape, weight_OI.is_contiguous(), torch.get_num_threads())
    verdict = _verdicts.get(case)
    product = None if verdict is False else kind.make(weight_OI)
    if product is None or verdict:
        return product
    _verdicts[case] = verdict = _gives_rows_the_same_bits(product, weight_OI)
    if verdict:
        return product
    _log.info(
        "the %s product is not used for weights of shape %s: on this machine the bits of a row "
        "depend on the other rows",
        kind.name,
        tuple(weight_OI.shape),
    )
    return None


def _gives_rows_the_same_bits(product: InvariantProduct, weight_OI: Tensor) -> bool:
    outputs, inputs = weight_OI.shape
    count = trial_rows(outputs, inputs)
    x_TI = random_rows(count, inputs)

    def multiply(part: slice) -> Tensor:
        return product(x_TI[part], x_TI.new_empty(part.stop - part.start, outputs))

    # A single row is padded with copies of itself.
    alone, among = product(x_TI[:1].expand(ROW_STEP, -1))[:1], product(x_TI[:ROW_STEP])[:1]
    return same_bits(alone, among) and rows_agree(multiply, count, product.row_step)


_verdicts: Final[dict[_Case, bool]] = {}
"""Mutable state of the process: what has been tried on this machine."""


class OneDnnProduct:
    """oneDNN's product with a copy of the weight."""

    row_step = 1

    @classmethod
    def of(cls, weight_OI: Tensor) -> OneDnnProduct | None:
        """The product, if the weight is large enough for a copy and torch has oneDNN."""
        if weight_OI.numel() <= _SMALL or not torch.backends.mkldnn.is_available():
            return None
        return cls(weight_OI)

    def __init__(self, weight_OI: Tensor) -> None:
        # Without a number of rows, so that the layout suits any.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product; `out` gets a copy."""
        # Naming the overload saves its resolution in every layer.
        product = torch.ops.mkldnn._linear_pointwise.default
        y_TO = product(x_TI, self._packed, None, "none", [], "")
        return y_TO if out is None else out.copy_(y_TO)


class SteppedProduct:
    """`torch.mm` on a multiple of `ROW_STEP` rows."""

    row_step = ROW_STEP

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_IO = weight_OI.T

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in new memory or in `out`."""
        return torch.mm(x_TI, self._weight_IO, out=out)


class BlockProduct:
    """`torch.mm` of `rows` rows at a time, with the same memory layout in every call.

    Calls with the same shapes sum in the same order. The trial only has to show that all rows of a
    block are computed in the same way, which is trivially true of a block of one row.
    """

    row_step = 1

    def __init__(self, weight_OI: Tensor, rows: int) -> None:
        self._weight_IO = weight_OI.T
        self._rows = rows

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in new memory or in `out`."""
        inputs, outputs = self._weight_IO.shape
        y_TO = x_TI.new_empty(len(x_TI), outputs) if out is None else out
        for first in range(0, len(x_TI), self._rows):
            part_TI = x_TI[first : first + self._rows]
            block_RI = x_TI.new_zeros(self._rows, inputs)
            block_RI[: len(part_TI)] = part_TI
            y_TO[first : first + self._rows] = (block_RI @ self._weight_IO)[: len(part_TI)]
        return y_TO


_BLOCK: Final = 16
_ONE_BY_ONE: Final = ProductKind("1-row", partial(BlockProduct, rows=1))
BLOCKS: Final = ProductKind(f"{_BLOCK}-row", partial(BlockProduct, rows=_BLOCK))
_KINDS: Final = (
    ProductKind("oneDNN", OneDnnProduct.of),
    ProductKind("stepped", SteppedProduct),
    BLOCKS,
)
