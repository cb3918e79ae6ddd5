"""One step of AdamW on float32 vectors of a CPU, on as many threads as torch computes with."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import TYPE_CHECKING, Final

import torch

from tinkex.engine.native import optimizer_code
from tinkex.engine.native.library import library
from tinkex.engine.native.text import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.types import AdamParams

_ARGUMENTS: Final = struct.Struct("9q" + "f4x" * len(optimizer_code.FACTORS))


def adamw(
    old: Sequence[Tensor], new: Sequence[Tensor], *, clip: float, step: int, params: AdamParams
) -> tuple[int, float]:
    """Write as many new parameters and moments as there is code for; how many, and their change.

    `old` are parameters, gradient and both moments, `new` is room for parameters and moments. The
    change is the sum of its squares.
    """
    native = library()
    count = old[0].numel() // LANES * LANES
    if native is None or not count or any(not _suits(vector) for vector in (*old, *new)):
        return 0, 0.0
    squares = torch.empty(-(-count // optimizer_code.BLOCK))
    factors = (
        clip,
        params.beta1,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        1 - params.learning_rate * params.weight_decay,
        params.learning_rate / (1 - params.beta1**step),
        math.sqrt(1 - params.beta2**step),
        params.eps,
    )
    places = (vector.data_ptr() for vector in (*old, *new, squares))
    run = native.function(optimizer_code.NAME)
    # A number that is too large for a float becomes infinite, as it does in torch.
    small = (ctypes.c_float(factor).value for factor in factors)
    run(_ARGUMENTS.pack(*places, count, *small), torch.get_num_threads())
    return count, float(squares.double().sum())


def _suits(vector: Tensor) -> bool:
    at = vector.data_ptr() if vector.device.type == "cpu" else 1
    return vector.dtype == torch.float32 and vector.is_contiguous() and at % 64 == 0
