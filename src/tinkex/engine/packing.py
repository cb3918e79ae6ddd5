"""Sequences of many operations laid end to end: no padding, segments by adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MIN_ROWS: Final = 16
"""Fewer rows than this take other matrix kernels, whose results differ in the last bits."""


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The position of every token within its own sequence."""
    return torch.cat([torch.arange(length) for length in lengths]).to(device)
