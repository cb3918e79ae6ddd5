"""Tries on this machine whether a row has the same bits whatever the other rows are.

Libraries choose a kernel by the processor, the shapes and the number of threads, and do not promise
an order of summation. A way to multiply is therefore tried before it is used: random rows are
multiplied all at once, and again in parts of various sizes and positions.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_FEWEST_ROWS: Final = 24
_MOST_ROWS: Final = 512
_MULTIPLICATIONS: Final = 2**26
"""What multiplying all rows may take beyond `_FEWEST_ROWS`: some milliseconds."""
_NUMBERS: Final = 2**17
"""What all rows may hold beyond `_FEWEST_ROWS`: half a megabyte, which needs no budget."""
_SIZES: Final = (4, 5, 8, 13, 16, 31, 60, 129, 260, 500)
"""Rows of a part. Libraries choose by powers of two, so these lie on and around some."""
_STARTS: Final = (0, 1, 6, 11, 19)
"""Where parts begin; others are at the end. Every place within a block of 16 rows is compared."""


def trial_rows(outputs: int, inputs: int) -> int:
    """How many rows to try with a weight of this shape: a multiple of four."""
    fitting = _NUMBERS // max(outputs, inputs)
    affordable = min(_MULTIPLICATIONS // (outputs * inputs), fitting, _MOST_ROWS)
    return max(affordable - affordable % 4, _FEWEST_ROWS)


def random_rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Float32 numbers that do not touch torch's own generator."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def rows_agree(compute: Callable[[slice], Tensor], count: int, step: int = 1) -> bool:
    """Whether each of `count` rows has the same bits in every part that is computed.

    Parts have whole steps of rows, and at least four of them.
    """
    with torch.no_grad():
        whole = compute(slice(0, count))
        return all(same_bits(compute(part), whole[part]) for part in _parts(count, step))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Not a number is the same as itself here."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _parts(count: int, step: int) -> Iterator[slice]:
    sizes = dict.fromkeys(-(-size // step) * step for size in _SIZES)
    for start, size in zip_longest(_STARTS, sizes, fillvalue=count):
        if size < count:
            first = min(start, count - size)
            yield slice(first, first + size)
