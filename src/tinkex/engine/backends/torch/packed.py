"""Products with a frozen float32 weight on a CPU that give a row the same bits in any company.

There are several ways. The first is taken that the machine has and that passes a trial there: see
`row_trial`. The last one needs none.

- *oneDNN*: the library's product with a copy of the weight in the layout that its kernels read.
  Calling it takes longer than multiplying with a small weight.
- *stepped*: the library's plain product, in whole steps of four rows. It brings the weight into
  another order at every call.
- *blocks*: the same product of always as many rows, filled up with zeros; at last of one row. It
  reads the weight once for every block.

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
"""The fewest rows of a product; some have whole steps of as many."""
_SMALL: Final = 2**18
"""Weights of up to so many numbers are not worth packing for oneDNN."""


class PackedProduct(Protocol):
    """`x @ W.T` for at least `ROW_STEP` rows, and whole steps of `row_step`."""

    row_step: int

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        ...


class Way(NamedTuple):
    """A way to multiply; `make` returns None for a weight or a machine that it is not for."""

    name: str
    make: Callable[[Tensor], PackedProduct | None]


def packed_product(weight_OI: Tensor) -> PackedProduct:
    """The best way to multiply with a float32 weight on this machine."""
    return first_that_passes(weight_OI, _WAYS)[1]


def first_that_passes(weight_OI: Tensor, ways: Sequence[Way]) -> tuple[Way, PackedProduct]:
    """The first of the ways that passes its trial here, and the product with this weight."""
    for way in ways:
        product = _tried(way, weight_OI)
        if product is not None:
            return way, product
    return _ONE_BY_ONE, BlockProduct(weight_OI, 1)


class _Case(NamedTuple):
    """What libraries choose their kernels by, in one process."""

    way: Way
    shape: torch.Size
    contiguous: bool
    threads: int


def _tried(way: Way, weight_OI: Tensor) -> PackedProduct | None:
    case = _Case(way, weight_OI.shape, weight_OI.is_contiguous(), torch.get_num_threads())
    verdict = _verdicts.get(case)
    product = None if verdict is False else way.make(weight_OI)
    if product is None or verdict:
        return product
    _verdicts[case] = verdict = _gives_rows_the_same_bits(product, weight_OI)
    if verdict:
        return product
    _log.info(
        "the %s product is not used for weights of shape %s: on this machine the bits of a row "
        "depend on the other rows",
        way.name,
        tuple(weight_OI.shape),
    )
    return None


def _gives_rows_the_same_bits(product: PackedProduct, weight_OI: Tensor) -> bool:
    outputs, inputs = weight_OI.shape
    count = trial_rows(outputs, inputs)
    x_TI = random_rows(count, inputs)

    def multiply(part: slice) -> Tensor:
        return product(x_TI[part], x_TI.new_empty(part.stop - part.start, outputs))

    # A single row is filled up with copies of itself.
    alone, among = product(x_TI[:1].expand(ROW_STEP, -1))[:1], product(x_TI[:ROW_STEP])[:1]
    return same_bits(alone, among) and rows_agree(multiply, count, product.row_step)


_verdicts: Final[dict[_Case, bool]] = {}
"""Mutable state of the process: what has been tried on this machine."""


class OneDnnProduct:
    """oneDNN's product with a copy of the weight."""

    row_step = 1

    @classmethod
    def of(cls, weight_OI: Tensor) -> OneDnnProduct | None:
        """The product with a weight that is worth a copy, where torch has oneDNN."""
        if weight_OI.numel() <= _SMALL or not torch.backends.mkldnn.is_available():
            return None
        return cls(weight_OI)

    def __init__(self, weight_OI: Tensor) -> None:
        # No number of rows is named: the layout shall suit any.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product; `out` gets a copy."""
        # Naming the overload saves looking for it in every layer.
        product = torch.ops.mkldnn._linear_pointwise.default
        y_TO = product(x_TI, self._packed, None, "none", [], "")
        return y_TO if out is None else out.copy_(y_TO)


class SteppedProduct:
    """The library's product."""

    row_step = ROW_STEP

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_IO = weight_OI.T

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product of whole steps of rows."""
        return torch.mm(x_TI, self._weight_IO, out=out)


class BlockProduct:
    """The library's product of `rows` rows at a time, always in memory that lies alike.

    The same call on the same shapes adds up in the same order. What is left to be tried is whether
    all rows of a block are treated alike; a block of one row has no other.
    """

    row_step = 1

    def __init__(self, weight_OI: Tensor, rows: int) -> None:
        self._weight_IO = weight_OI.T
        self._rows = rows

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        inputs, outputs = self._weight_IO.shape
        y_TO = x_TI.new_empty(len(x_TI), outputs) if out is None else out
        for first in range(0, len(x_TI), self._rows):
            part_TI = x_TI[first : first + self._rows]
            block_RI = x_TI.new_zeros(self._rows, inputs)
            block_RI[: len(part_TI)] = part_TI
            y_TO[first : first + self._rows] = (block_RI @ self._weight_IO)[: len(part_TI)]
        return y_TO


_BLOCK: Final = 16
_ONE_BY_ONE: Final = Way("1-row", partial(BlockProduct, rows=1))
BLOCKS: Final = Way(f"{_BLOCK}-row", partial(BlockProduct, rows=_BLOCK))
_WAYS: Final = (
    Way("oneDNN", OneDnnProduct.of),
    Way("stepped", SteppedProduct),
    BLOCKS,
)
