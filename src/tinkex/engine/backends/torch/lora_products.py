"""The two batch-invariant products of a LoRA adapter: shrink (x A^T) and expand (z B^T).

On a CPU the library picks its kernel by the number of rows of each thread, and kernels sum in
different orders. Multiples of `STEP` rows mostly use the same kernel, so the remaining rows are
padded to `STEP`. A trial checks that for each size of a factor; where it fails, slower products
that pass the trial are used (see `batch_invariant`). On other devices these are plain products.

Shapes: S rows, Z inner activations, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.batch_invariant import BLOCKS, ProductKind, first_that_passes
from tinkex.engine.backends.torch.row_trial import random_rows, rows_agree, trial_rows

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.backends.torch.batch_invariant import InvariantProduct

_log = logging.getLogger(__name__)

STEP: Final = 16
"""From this many rows and columns on the library uses its usual kernel."""


def shrink(x_SI: Tensor, a_ZI: Tensor) -> Tensor:
    """z_SZ = x @ A.T"""
    if a_ZI.device.type != "cpu":
        return F.linear(x_SI, a_ZI)
    rank = a_ZI.shape[0]
    if rank < STEP:
        # Kernels for few columns sum in an order that depends on the alignment of the rows.
        return shrink(x_SI, _padded(a_ZI))[:, :rank]
    return _product(a_ZI)(x_SI)


def expand_add_(y_SO: Tensor, z_SZ: Tensor, b_OZ: Tensor, scale: float) -> None:
    """y += scale * z @ B.T"""
    if not _is_tried(b_OZ) or _addmm_is_invariant(*b_OZ.shape, torch.get_num_threads()):
        _add_in_steps_(y_SO, z_SZ, b_OZ, scale)
    else:
        # Scaled first: an elementwise addition rounds the same way for any number of rows.
        y_SO.add_(_product(b_OZ)(z_SZ * scale))


def _add_in_steps_(y_SO: Tensor, z_SZ: Tensor, b_OZ: Tensor, scale: float) -> None:
    rows, whole = y_SO.shape[0], _whole_steps(y_SO)
    if whole == rows:
        y_SO.addmm_(z_SZ, b_OZ.T, alpha=scale)
        return
    if whole:
        y_SO[:whole].addmm_(z_SZ[:whole], b_OZ.T, alpha=scale)
    rest_SO = _padded(y_SO[whole:])
    rest_SO.addmm_(_padded(z_SZ[whole:]), b_OZ.T, alpha=scale)
    y_SO[whole:] = rest_SO[: rows - whole]


@cache
def _addmm_is_invariant(outputs: int, rank: int, _threads: int) -> bool:
    """Whether `_add_in_steps_` is batch-invariant on this machine."""
    # Alone, and as columns of a joined product, where the row stride is larger.
    invariant = all(_addmm_is_invariant_within(others, outputs, rank) for others in (0, STEP))
    if not invariant:
        _log.info(
            "addmm is not used for adapter weights of shape %s: on this machine the bits of a row "
            "depend on the other rows",
            (outputs, rank),
        )
    return invariant


def _addmm_is_invariant_within(others: int, outputs: int, rank: int) -> bool:
    count = trial_rows(outputs + others, rank + others)
    b_OZ = random_rows(outputs, rank)
    z_TZ = random_rows(count, rank + others, seed=1)[:, :rank]
    y_TY = random_rows(count, outputs + others, seed=2)

    def added(part: slice) -> Tensor:
        # At their offset among all rows: libraries also choose by alignment.
        y_SO = y_TY.clone()[part, :outputs]
        _add_in_steps_(y_SO, z_TZ[part], b_OZ, 0.7)
        return y_SO

    return rows_agree(added, count)


class _SteppedProduct:
    """`torch.mm` of multiples of `STEP` rows; the remaining rows are padded to `STEP`."""

    row_step = 1

    def __init__(self, factor_OI: Tensor) -> None:
        self._factor_OI = factor_OI

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in new memory or in `out`."""
        factor_OI, rows, whole = self._factor_OI, x_TI.shape[0], _whole_steps(x_TI)
        y_TO = x_TI.new_empty(rows, factor_OI.shape[0]) if out is None else out
        if whole:
            torch.mm(x_TI[:whole], factor_OI.T, out=y_TO[:whole])
        if whole < rows:
            y_TO[whole:] = F.linear(_padded(x_TI[whole:]), factor_OI)[: rows - whole]
        return y_TO


_KINDS: Final = (ProductKind("stepped", _SteppedProduct), BLOCKS)


def _product(factor_OI: Tensor) -> InvariantProduct:
    """The product with a factor on a CPU."""
    if not _is_tried(factor_OI):
        return _SteppedProduct(factor_OI)
    product = _kind(*factor_OI.shape, torch.get_num_threads()).make(factor_OI)
    assert product is not None
    return product


@cache
def _kind(outputs: int, inputs: int, _threads: int) -> ProductKind:
    # Random numbers instead of the factor itself: B is zero before it is trained.
    return first_that_passes(random_rows(outputs, inputs), _KINDS)[0]


def _is_tried(factor: Tensor) -> bool:
    return factor.device.type == "cpu" and factor.dtype == torch.float32


def _whole_steps(x: Tensor) -> int:
    rows = x.shape[0]
    return rows - rows % STEP if x.device.type == "cpu" else rows


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, STEP - x.shape[0]))
