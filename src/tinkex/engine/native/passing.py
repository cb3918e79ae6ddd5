"""Products of float32 matrices that are all new, as an adapter's factors are after every step.

For a CPU, on as many threads as torch computes with; any number of products in one call, one after
the other. Matrices are named by where they lie, in bytes, and by how far apart their rows and terms
are, in numbers: making a tensor for each would take as long as some of the products.

Shapes: M rows, N columns, K terms.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tinkex.engine.native import passing_code
from tinkex.engine.native.library import library
from tinkex.engine.native.text import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PRODUCT: Final = struct.Struct("12qf4x")
_ARGUMENTS: Final = struct.Struct("4q")


class Place(NamedTuple):
    """Where a matrix of float32 lies; one of the steps is 1."""

    at: int
    row: int
    column: int = 1

    @property
    def turned(self) -> Place:
        return Place(self.at, self.column, self.row)

    def from_row(self, row: int) -> Place:
        return Place(self.at + 4 * row * self.row, self.row, self.column)

    def from_column(self, column: int) -> Place:
        return Place(self.at + 4 * column * self.column, self.row, self.column)


def place(matrix: Tensor) -> Place:
    """Where a tensor lies."""
    return Place(matrix.data_ptr(), *matrix.stride())


def suits(factor: Tensor) -> bool:
    """Whether there is code for products with a float32 matrix and any number of rows."""
    rows, columns = factor.shape
    if factor.dtype != torch.float32 or rows % LANES or columns % LANES or factor.is_cuda:
        return False
    return factor.stride(1) == 1 and passing() is not None


class Passing:
    """Products to be computed in the order in which they were added."""

    def __init__(self) -> None:
        self._products: list[bytes] = []
        self._room_size = 0

    def multiply(
        self,
        out: Place,
        left: Place,
        right: Place,
        shape: tuple[int, int, int],
        scale: float = 1.0,
        *,
        add: bool = False,
    ) -> None:
        """Write `scale * left @ right` to `out`, or add it; the shape is M, N, K.

        Columns come in sixteens, and so do terms that lie side by side, and rows if they do.
        """
        rows, columns, terms = shape
        assert out.column == 1
        assert 1 in left[1:]
        assert 1 in right[1:]
        assert columns % LANES == 0
        assert (rows if left.row == 1 else terms) % LANES == 0
        assert right.column == 1 or terms % LANES == 0
        packed = _PRODUCT.pack(
            left.at, right.at, out.at, *shape, *left[1:], *right[1:], out.row, add, scale
        )
        self._products.append(packed)
        self._room_size = max(self._room_size, passing_code.room_size(*shape))

    def shrink(self, z: Place, x: Place, a_ZI: Tensor, rows: int) -> None:
        """z = x @ A.T"""
        ranks, inputs = a_ZI.shape
        self.multiply(z, x, place(a_ZI).turned, (rows, ranks, inputs))

    def expand_add(self, y: Place, z: Place, b_OR: Tensor, rows: int, scale: float) -> None:
        """y += scale * z @ B.T"""
        outputs, rank = b_OR.shape
        self.multiply(y, z, place(b_OR).turned, (rows, outputs, rank), scale, add=True)

    def run(self) -> None:
        """Compute them."""
        run = passing()
        assert run is not None
        threads = torch.get_num_threads()
        rooms = torch.empty(threads * self._room_size)
        products = ctypes.c_char_p(b"".join(self._products))
        at = ctypes.cast(products, ctypes.c_void_p).value
        run(_ARGUMENTS.pack(at, rooms.data_ptr(), self._room_size, len(self._products)), threads)


@cache
def passing() -> Callable[[bytes, int], None] | None:
    """What runs them; None where there is no code."""
    native = library()
    return None if native is None else native.function(passing_code.NAME)
