"""Tries on this machine whether a product is batch-invariant.

Libraries choose a kernel by the processor, the shapes and the number of threads, and do not promise
an order of summation. So a product is tried before it is used: random rows are multiplied all at
once, and again in parts of various sizes and positions.
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
"""Multiplications of a trial with more than `_FEWEST_ROWS`: some milliseconds."""
_NUMBERS: Final = 2**17
"""Elements of a trial with more than `_FEWEST_ROWS`: half a megabyte."""
_SIZES: Final = (4, 5, 8, 13, 16, 31, 60, 129, 260, 500)
"""Rows of a part: powers of two and their neighbours, because libraries choose by those."""
_STARTS: Final = (0, 1, 6, 11, 19)
"""First rows of parts; others are at the end. Every offset within a block of 16 rows occurs."""


def trial_rows(outputs: int, inputs: int) -> int:
    """How many rows to try with a weight of this shape: a multiple of four."""
    fitting = _NUMBERS // max(outputs, inputs)
    affordable = min(_MULTIPLICATIONS // (outputs * inputs), fitting, _MOST_ROWS)
    return max(affordable - affordable % 4, _FEWEST_ROWS)


def random_rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Float32 numbers; torch's default generator is not used."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def rows_agree(compute: Callable[[slice], Tensor], count: int, step: int = 1) -> bool:
    """Whether each of `count` rows has the same bits in every part that is computed.

    Parts are multiples of `step` rows, and at least four rows.
    """
    with torch.no_grad():
        whole = compute(slice(0, count))
        return all(same_bits(compute(part), whole[part]) for part in _parts(count, step))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality, also of NaN."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _parts(count: int, step: int) -> Iterator[slice]:
    sizes = dict.fromkeys(-(-size // step) * step for size in _SIZES)
    for start, size in zip_longest(_STARTS, sizes, fillvalue=count):
        if size < count:
            first = min(start, count - size)
            yield slice(first, first + size)
