"""Allocator settings of a process that only runs an engine on a CPU, and of one that runs none.

In the engine's process:

- Freed memory is kept for the next tensor of that size. By default glibc returns large blocks to
  the system at once, and every pass then has page faults again: a twentieth of a training step,
  more for optimizer steps. The process never shrinks.
- Large tensors use huge pages. Every decoding step reads all weights once, and TLB misses of small
  pages take longer than the reads: with huge pages reading weights is more than twice as fast.
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
"""Larger blocks are rare enough to be returned to the system."""
_LARGE_BLOCK: Final = 2**23
"""Larger than the bodies and results of common requests."""


def keep_freed_memory() -> bool:
    """Return whether the C library supports it; if not, nothing is changed.

    Call it before the first tensor is made: torch then reads the setting for huge pages.
    """
    # For torch, which reads it through the C library; `os.environ` does not change.
    os.putenv("THP_MEM_ALLOC_ENABLE", "1")
    return _mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and _mallopt(_TRIM_THRESHOLD, _NEVER)


def return_large_blocks() -> bool:
    """Return large blocks to the system when they are freed, in a process without an engine.

    By default glibc keeps blocks of a size that was freed before, and one large request makes the
    process large for ever. Returns whether the C library supports it.
    """
    return _mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)


def _mallopt(setting: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(setting, value))  # None: not glibc
