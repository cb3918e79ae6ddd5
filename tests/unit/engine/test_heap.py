"""Where memory lies, and keeping it; in a process of its own, because it cannot be undone."""

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

PLACE = """
import torch
from tinkex.engine.heap import keep_freed_memory

keep_freed_memory()
tensor = torch.ones(2**22)
address = tensor.data_ptr() + tensor.nbytes // 2
with open("/proc/self/smaps") as file:
    for line in file:
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and start <= address < end:
            print("hg" in rest.split())
"""

only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")


def output(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return run.stdout


@only_glibc
def test_large_tensors_ask_for_huge_pages():
    assert output(PLACE).split() == ["True"]


@only_glibc
def test_freed_memory_is_used_again_without_asking_the_system():
    kept, faults = output(PROGRAM).split()
    assert kept == "True"
    # 128 MiB have 32,768 pages, each of which would be asked for twenty times.
    assert int(faults) < 32_768
