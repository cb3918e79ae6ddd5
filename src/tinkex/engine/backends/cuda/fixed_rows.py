"""Batch-invariant matrix products on a CUDA device.

The library picks a kernel by the number of rows, and kernels differ in the last bits. Here it is
only called with block sizes that gave the same bits in a trial with a weight of that shape, with or
without a bias as in the call; a short last block is padded. Rows of a block do not influence each
other.

Shapes: T rows, C rows of a block, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS: Final = 256
"""The reference block size: the others must give its bits."""
LARGE_BLOCKS: Final = (16384, 8192, 4096, 2048, 1024)
_TRIAL_BYTES: Final = 2**31
"""The largest product of a trial."""
_SEED: Final = 271_828


class Product(Protocol):
    """The library's product."""

    def __call__(
        self, x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return y_CO in `dtype`."""
        ...


class _Case(NamedTuple):
    """What the library chooses a kernel by, besides the number of rows."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    has_bias: bool


def library_product(
    x_CI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`F.linear`, or the product in another precision, which has no bias."""
    if dtype == x_CI.dtype:
        return F.linear(x_CI, weight_OI, bias_O)
    assert bias_O is None
    return torch.mm(x_CI, weight_OI.T, out_dtype=dtype)


class FixedRows:
    """Runs matrix products in blocks of rows; caches the valid block sizes of each shape."""

    def __init__(self, product: Product = library_product) -> None:
        self._product = product
        # Mutable state: allowed block sizes, largest first.
        self._blocks: dict[_Case, tuple[int, ...]] = {}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear`; the bits of a row do not depend on the number of rows."""
        return self._in_blocks(x_TI, weight_OI, bias_O, x_TI.dtype)

    def logits(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """The product in fp32."""
        return self._in_blocks(x_TI, weight_OI, None, torch.float32)

    def _in_blocks(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows = x_TI.shape[0]
        case = _Case(weight_OI.shape[0], weight_OI.shape[1], dtype, bias_O is not None)
        blocks = self._blocks.get(case)
        if blocks is None:
            blocks = self._blocks[case] = self._find_blocks(weight_OI, bias_O, dtype)
        if rows in blocks:
            return self._product(x_TI, weight_OI, bias_O, dtype)
        y_TO = x_TI.new_empty((rows, weight_OI.shape[0]), dtype=dtype)
        start = 0
        while start < rows:
            size = next((size for size in blocks if size <= rows - start), BLOCK_ROWS)
            block_CI = x_TI[start : start + size]
            if (missing := size - block_CI.shape[0]) > 0:
                block_CI = F.pad(block_CI, (0, 0, 0, missing))
            block_CO = self._product(block_CI, weight_OI, bias_O, dtype)
            y_TO[start : start + size] = block_CO[: rows - start]
            start += size
        return y_TO

    def _find_blocks(
        self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """The block sizes that give the bits of `BLOCK_ROWS`, tried on random rows.

        The call is the one that will be made: same function, weight and bias. Kernels with another
        order of summation differ in many of the thousands of results compared.
        """
        device = weight_OI.device
        generator = torch.Generator(device).manual_seed(_SEED)
        row_bytes = weight_OI.shape[0] * dtype.itemsize
        sizes = [size for size in LARGE_BLOCKS if size * row_bytes <= _TRIAL_BYTES]
        x_CI = torch.randn(
            (LARGE_BLOCKS[0], weight_OI.shape[1]), generator=generator, device=device
        ).to(weight_OI.dtype)

        def product(rows_CI: Tensor) -> Tensor:
            return self._product(rows_CI, weight_OI, bias_O, dtype)

        wanted_CO = torch.cat([product(part) for part in (x_CI[:BLOCK_ROWS], x_CI[-BLOCK_ROWS:])])
        found = [BLOCK_ROWS]
        for size in reversed(sizes):
            y_CO = product(torch.cat((x_CI[: size - BLOCK_ROWS], x_CI[-BLOCK_ROWS:])))
            if torch.equal(torch.cat((y_CO[:BLOCK_ROWS], y_CO[-BLOCK_ROWS:])), wanted_CO):
                found.append(size)
        return tuple(reversed(found))
