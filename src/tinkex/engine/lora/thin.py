"""The two products of a LoRA adapter, with the same bits for a row in any company.

On a CPU they run in machine code of our own, if their sizes suit it. Otherwise the library picks
its kernel by the number of rows that each thread gets, and kernels add up in different orders.
Whole steps of `STEP` rows always take the same one, so rows beyond the last whole step are filled
up to one. Everywhere else these are plain products.

Shapes: S rows, Z inner activations, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from tinkex.engine.native import Passing, place, suits

if TYPE_CHECKING:
    from torch import Tensor

STEP: Final = 16
"""Rows and columns from which on the usual kernel is taken."""


def shrink(x_SI: Tensor, a_ZI: Tensor) -> Tensor:
    """z_SZ = x @ A.T"""
    if suits(a_ZI):
        x_SI = x_SI.contiguous()
        z_SZ, products = x_SI.new_empty(x_SI.shape[0], a_ZI.shape[0]), Passing()
        products.shrink(place(z_SZ), place(x_SI), a_ZI, x_SI.shape[0])
        products.run()
        return z_SZ
    if a_ZI.device.type != "cpu":
        return F.linear(x_SI, a_ZI)
    rank = a_ZI.shape[0]
    if rank < STEP:
        # Few columns take kernels of their own, whose order depends on where the rows begin.
        return shrink(x_SI, _filled_up(a_ZI))[:, :rank]
    whole = _whole(x_SI)
    if whole == x_SI.shape[0]:
        return F.linear(x_SI, a_ZI)
    z_SZ = x_SI.new_empty(x_SI.shape[0], rank)
    if whole:
        torch.mm(x_SI[:whole], a_ZI.T, out=z_SZ[:whole])
    z_SZ[whole:] = F.linear(_filled_up(x_SI[whole:]), a_ZI)[: x_SI.shape[0] - whole]
    return z_SZ


def expand_add_(y_SO: Tensor, z_SZ: Tensor, b_OZ: Tensor, scale: float) -> None:
    """y += scale * z @ B.T"""
    if suits(b_OZ):
        products = Passing()
        products.expand_add(place(y_SO), place(z_SZ), b_OZ, y_SO.shape[0], scale)
        products.run()
        return
    rows, whole = y_SO.shape[0], _whole(y_SO)
    if whole == rows:
        y_SO.addmm_(z_SZ, b_OZ.T, alpha=scale)
        return
    if whole:
        y_SO[:whole].addmm_(z_SZ[:whole], b_OZ.T, alpha=scale)
    rest_SO = _filled_up(y_SO[whole:])
    rest_SO.addmm_(_filled_up(z_SZ[whole:]), b_OZ.T, alpha=scale)
    y_SO[whole:] = rest_SO[: rows - whole]


def _whole(x: Tensor) -> int:
    rows = x.shape[0]
    return rows - rows % STEP if x.device.type == "cpu" else rows


def _filled_up(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, STEP - x.shape[0]))
