"""Have the C library keep memory that was freed, for the next tensor of that size.

By default glibc hands large blocks back to the system at once, and every pass then pays for
each of their pages again: on a CPU a twentieth of a training step, more for optimizer steps.
Meant for a process that does nothing but run an engine: it never gets smaller again.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_INT: Final = 2**31 - 1
_LARGEST_BLOCK: Final = 2**30
"""Larger ones are rare enough to be handed back."""


def keep_freed_memory() -> bool:
    """Return whether this process's C library can do so; if not, nothing is changed."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, _LARGEST_INT))
