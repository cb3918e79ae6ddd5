"""Matrix products on a CUDA device whose rows have the same bits in any company.

The library picks a kernel by the number of rows, and kernels differ in the last bits. Here it
is only ever called with block sizes that were seen to give the same bits for a weight of that
shape; a short last block is filled up. Rows do not influence each other within a block.

Shapes: T rows, C rows of a block, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS: Final = 256
"""The block that always works: it is the measure for the others."""
LARGE_BLOCKS: Final = (16384, 8192, 4096, 2048, 1024)
_TRIAL_BYTES: Final = 2**31
"""How large a product may be that is only tried."""
_SEED: Final = 271_828


class FixedRows:
    """Calls matrix products in blocks of rows; remembers which blocks fit which shape."""

    def __init__(self) -> None:
        # Mutable state: allowed block sizes by (outputs, inputs, dtype), largest first.
        self._blocks: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear`, row by row the same whatever the number of rows."""
        return self._in_blocks(x_TI, weight_OI, bias_O, x_TI.dtype)

    def logits(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """The product in fp32."""
        return self._in_blocks(x_TI, weight_OI, None, torch.float32)

    def _in_blocks(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows = x_TI.shape[0]
        key = (weight_OI.shape[0], weight_OI.shape[1], dtype)
        blocks = self._blocks.get(key)
        if blocks is None:
            blocks = self._blocks[key] = _find_blocks(weight_OI, dtype)
        if rows in blocks:
            return _product(x_TI, weight_OI, bias_O, dtype)
        y_TO = x_TI.new_empty((rows, weight_OI.shape[0]), dtype=dtype)
        start = 0
        while start < rows:
            size = next((size for size in blocks if size <= rows - start), BLOCK_ROWS)
            block_CI = x_TI[start : start + size]
            if (missing := size - block_CI.shape[0]) > 0:
                block_CI = F.pad(block_CI, (0, 0, 0, missing))
            block_CO = _product(block_CI, weight_OI, bias_O, dtype)
            y_TO[start : start + size] = block_CO[: rows - start]
            start += size
        return y_TO


def _product(x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype == x_CI.dtype:
        return F.linear(x_CI, weight_OI, bias_O)
    return torch.mm(x_CI, weight_OI.T, out_dtype=dtype)


def _find_blocks(weight_OI: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """The block sizes that give the bits of `BLOCK_ROWS`, tried on random rows.

    Kernels that add up in another order differ in many of the thousands of results compared.
    """
    device = weight_OI.device
    generator = torch.Generator(device).manual_seed(_SEED)
    x_CI = torch.randn(
        (LARGE_BLOCKS[0], weight_OI.shape[1]), generator=generator, device=device
    ).to(weight_OI.dtype)
    wanted_CO = torch.cat(
        [_product(part, weight_OI, None, dtype) for part in (x_CI[:BLOCK_ROWS], x_CI[-BLOCK_ROWS:])]
    )
    found = [BLOCK_ROWS]
    row_bytes = weight_OI.shape[0] * dtype.itemsize
    for size in reversed([size for size in LARGE_BLOCKS if size * row_bytes <= _TRIAL_BYTES]):
        rows = torch.cat((x_CI[: size - BLOCK_ROWS], x_CI[-BLOCK_ROWS:]))
        y_CO = _product(rows, weight_OI, None, dtype)
        if torch.equal(torch.cat((y_CO[:BLOCK_ROWS], y_CO[-BLOCK_ROWS:])), wanted_CO):
            found.append(size)
    return tuple(reversed(found))
