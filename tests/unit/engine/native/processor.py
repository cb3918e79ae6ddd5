"""Which processor the tests run on, as far as the engine's code depends on it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tinkex.config import cpu_isa


def has_machine_code() -> bool:
    """Whether this machine must have the code: asked of the machine, not of the engine.

    A library that is missing or broken where it should be there thus fails tests instead of
    skipping them.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return cpu_isa() == "avx512" and " avx512f " in Path("/proc/cpuinfo").read_text()


needs_machine_code = pytest.mark.skipif(
    not has_machine_code(), reason="no AVX-512 under Linux, or TINKEX_CPU_ISA forbids it"
)
needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(),
    reason="one thread is known to give the bits of two with MKL alone",
)
