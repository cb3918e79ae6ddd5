"""The memory of a process that does nothing but run an engine on a CPU.

- Freed memory is kept for the next tensor of that size. By default glibc hands large blocks back
  to the system at once, and every pass then pays for each of their pages again: a twentieth of a
  training step, more for optimizer steps. The process never gets smaller again.
- Large tensors lie in huge pages. Every decoding step reads all weights once, and looking up
  where each small page lies takes longer than reading it: with huge pages weights arrive more
  than twice as fast.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = -1
_LARGEST_BLOCK: Final = 2**30
"""Larger ones are rare enough to be handed back."""


def keep_freed_memory() -> bool:
    """Return whether this process's C library can do so; if not, nothing is changed.

    Call it before the first tensor is made: torch then looks whether it may ask for huge pages.
    """
    # torch reads it with the C library; Python's own copy of the environment stays as it was.
    os.putenv("THP_MEM_ALLOC_ENABLE", "1")
    return _tell(_MMAP_THRESHOLD, _LARGEST_BLOCK) and _tell(_TRIM_THRESHOLD, _NEVER)


def _tell(setting: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(setting, value))  # None: not glibc
