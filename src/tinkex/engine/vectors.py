"""Memory for the flat vectors of adapters: weights, moments and gradients.

Every pass and every optimizer step makes new ones and lets old ones of the same size go. On a
CPU torch asks the C library for aligned memory. For that it looks for more than it takes in the
end, so the memory of a vector that is gone is too small for the next one: new pages come from
the system, which takes longer than all arithmetic of an optimizer step, and the process grows.
Memory that is asked for plainly is found again; here it is aligned by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT: Final = 64
"""Bytes, as torch aligns: where a vector begins may decide how a library adds up."""


def empty_vector(like_P: Tensor) -> Tensor:
    """A flat vector of the same kind, which holds nothing yet."""
    if like_P.device.type != "cpu":
        return torch.empty_like(like_P)
    memory = np.empty(like_P.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    own = torch.from_numpy(memory[start : start + like_P.nbytes])  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    return own.view(like_P.dtype)
