"""The two products of a LoRA adapter, with the same bits for a row in any company.

On a CPU the library picks its kernel by the number of rows that each thread gets, and kernels add
up in different orders. Whole steps of `STEP` rows mostly take the same kernel, so rows beyond the
last whole step are filled up to one. Whether that is so is tried for each size of a factor; where
it is not, products are computed in slower ways that pass the trial (see `models.packed`).
Everywhere else these are plain products.

Shapes: S rows, Z inner activations, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.packed import BLOCKS, Way, first_that_passes
from tinkex.engine.backends.torch.row_trial import random_rows, rows_agree, trial_rows

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.backends.torch.packed import PackedProduct

_log = logging.getLogger(__name__)

STEP: Final = 16
"""Rows and columns from which on the usual kernel is taken."""


def shrink(x_SI: Tensor, a_ZI: Tensor) -> Tensor:
    """z_SZ = x @ A.T"""
    if a_ZI.device.type != "cpu":
        return F.linear(x_SI, a_ZI)
    rank = a_ZI.shape[0]
    if rank < STEP:
        # Few columns take kernels of their own, whose order depends on where the rows begin.
        return shrink(x_SI, _filled_up(a_ZI))[:, :rank]
    return _product(a_ZI)(x_SI)


def expand_add_(y_SO: Tensor, z_SZ: Tensor, b_OZ: Tensor, scale: float) -> None:
    """y += scale * z @ B.T"""
    if not _is_tried(b_OZ) or _adds_alike(*b_OZ.shape, torch.get_num_threads()):
        _add_in_steps_(y_SO, z_SZ, b_OZ, scale)
    else:
        # Scaled first: what is then added number by number rounds the same way everywhere.
        y_SO.add_(_product(b_OZ)(z_SZ * scale))


def _add_in_steps_(y_SO: Tensor, z_SZ: Tensor, b_OZ: Tensor, scale: float) -> None:
    rows, whole = y_SO.shape[0], _whole(y_SO)
    if whole == rows:
        y_SO.addmm_(z_SZ, b_OZ.T, alpha=scale)
        return
    if whole:
        y_SO[:whole].addmm_(z_SZ[:whole], b_OZ.T, alpha=scale)
    rest_SO = _filled_up(y_SO[whole:])
    rest_SO.addmm_(_filled_up(z_SZ[whole:]), b_OZ.T, alpha=scale)
    y_SO[whole:] = rest_SO[: rows - whole]


@cache
def _adds_alike(outputs: int, rank: int, _threads: int) -> bool:
    """Whether `_add_in_steps_` gives a row the same bits in any company on this machine."""
    # Alone, and as columns of a joined product, in which rows lie further apart.
    alike = all(_adds_alike_beside(others, outputs, rank) for others in (0, STEP))
    if not alike:
        _log.info(
            "addmm is not used for adapter weights of shape %s: on this machine the bits of a row "
            "depend on the other rows",
            (outputs, rank),
        )
    return alike


def _adds_alike_beside(others: int, outputs: int, rank: int) -> bool:
    count = trial_rows(outputs + others, rank + others)
    b_OZ = random_rows(outputs, rank)
    z_TZ = random_rows(count, rank + others, seed=1)[:, :rank]
    y_TY = random_rows(count, outputs + others, seed=2)

    def added(part: slice) -> Tensor:
        # Where they lie among all rows: libraries also choose by the place in memory.
        y_SO = y_TY.clone()[part, :outputs]
        _add_in_steps_(y_SO, z_TZ[part], b_OZ, 0.7)
        return y_SO

    return rows_agree(added, count)


class _SteppedProduct:
    """The library's product in whole steps of `STEP` rows, filled up to one at the end."""

    row_step = 1

    def __init__(self, factor_OI: Tensor) -> None:
        self._factor_OI = factor_OI

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        factor_OI, rows, whole = self._factor_OI, x_TI.shape[0], _whole(x_TI)
        y_TO = x_TI.new_empty(rows, factor_OI.shape[0]) if out is None else out
        if whole:
            torch.mm(x_TI[:whole], factor_OI.T, out=y_TO[:whole])
        if whole < rows:
            y_TO[whole:] = F.linear(_filled_up(x_TI[whole:]), factor_OI)[: rows - whole]
        return y_TO


_WAYS: Final = (Way("stepped", _SteppedProduct), BLOCKS)


def _product(factor_OI: Tensor) -> PackedProduct:
    """The product with a factor on a CPU."""
    if not _is_tried(factor_OI):
        return _SteppedProduct(factor_OI)
    product = _way(*factor_OI.shape, torch.get_num_threads()).make(factor_OI)
    assert product is not None
    return product


@cache
def _way(outputs: int, inputs: int, _threads: int) -> Way:
    # Random numbers stand in for the factor: some are zero before they are trained.
    return first_that_passes(random_rows(outputs, inputs), _WAYS)[0]


def _is_tried(factor: Tensor) -> bool:
    return factor.device.type == "cpu" and factor.dtype == torch.float32


def _whole(x: Tensor) -> int:
    rows = x.shape[0]
    return rows - rows % STEP if x.device.type == "cpu" else rows


def _filled_up(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, STEP - x.shape[0]))
