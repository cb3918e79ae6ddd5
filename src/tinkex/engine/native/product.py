"""Products with a frozen float32 weight, on as many threads as torch computes with.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Self

import torch

from tinkex.engine.native import product_code
from tinkex.engine.native.library import library
from tinkex.engine.native.text import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tinkex.engine.native.library import Library

_ARGUMENTS: Final = struct.Struct("9q")


class NativeProduct:
    """`x @ W.T` for a copy of a weight in the order in which it is read."""

    row_step = 1

    def __init__(self, weight_OI: Tensor, native: Library) -> None:
        self._outputs, self._inputs = weight_OI.shape
        self._slab_size = product_code.slab_size(self._inputs)
        self._weight = _in_slabs(weight_OI, self._slab_size)
        self._run = native.function(product_code.NAME)

    @classmethod
    def of(cls, weight_OI: Tensor) -> Self | None:
        """The product with a float32 weight on the CPU; None where there is no code for it."""
        if any(size % LANES for size in weight_OI.shape):
            return None
        native = library()
        return None if native is None else cls(weight_OI, native)

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(len(x_TI), self._outputs) if out is None else out
        self.bound(x_TI, y_TO)()
        return y_TO

    def bound(self, x_TI: Tensor, y_TO: Tensor) -> Callable[[], None]:
        """What writes the product with whatever is in `x` to `y` when it is called."""
        rows, threads = len(x_TI), torch.get_num_threads()
        for tensor, width in ((x_TI, self._inputs), (y_TO, self._outputs)):
            assert tensor.dtype == torch.float32
            assert tensor.shape == (rows, width)
            assert tensor.is_contiguous()
        room_size = product_code.room_size(rows, self._inputs)
        tensors = x_TI, self._weight, y_TO, torch.empty(threads * room_size)
        places = (tensor.data_ptr() for tensor in tensors)
        blocks = self._outputs // LANES
        counts = rows, self._inputs, blocks, self._slab_size, room_size
        run, arguments = self._run, _ARGUMENTS.pack(*places, *counts)

        def product(_kept: object = tensors) -> None:
            run(arguments, min(threads, torch.get_num_threads()))

        return product


def _in_slabs(weight_OI: Tensor, size: int) -> Tensor:
    """All numbers in the order in which they are read."""
    found = torch.empty(weight_OI.numel())
    outputs, inputs = weight_OI.shape
    for first in range(0, inputs, size):
        slab_OS = weight_OI[:, first : first + size]
        blocks = slab_OS.reshape(-1, LANES, slab_OS.shape[1]).transpose(1, 2)
        start = first * outputs
        found[start : start + slab_OS.numel()].view(blocks.shape).copy_(blocks)
    return found
