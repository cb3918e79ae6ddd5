"""Triton kernels for CUDA devices; a module in here is imported only where one is used."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)


def has_kernels(like: Tensor) -> bool:
    """Whether tensors of this device and type are served by kernels; all others run plainly."""
    return like.is_cuda and like.dtype in _DTYPES and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
