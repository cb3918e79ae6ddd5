"""Keeping freed memory; in a process of its own, because it cannot be undone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import numpy, resource
from tinkex.engine.heap import keep_freed_memory

kept = keep_freed_memory()
for _ in range(3):
    numpy.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    numpy.ones(2**24)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_used_again_without_asking_the_system():
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    kept, faults = answer.stdout.split()
    assert kept == "True"
    # 128 MiB have 32,768 pages, each of which would be asked for twenty times.
    assert int(faults) < 32_768
