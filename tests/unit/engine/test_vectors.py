"""Flat vectors: what they are like, and that their memory is found again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from tinkex.engine.vectors import empty_vector

PROGRAM = """
import resource
import torch
from tinkex.engine.heap import keep_freed_memory
from tinkex.engine.vectors import empty_vector

keep_freed_memory()
torch.set_num_threads(1)
like = torch.zeros(2**22)
held, between = [empty_vector(like).zero_() for _ in range(3)], []


def replace_all():
    for number in range(len(held)):
        held[number] = empty_vector(like).zero_()
        between.append(torch.zeros(100))  # what stays, and lies where it finds room


for _ in range(5):
    replace_all()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(20):
    replace_all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_vector_is_like_its_model_and_has_memory_of_its_own(dtype):
    like = torch.full((1001,), 3.0, dtype=dtype)
    made = empty_vector(like)
    assert (made.shape, made.dtype, made.device) == (like.shape, dtype, like.device)
    assert made.is_contiguous()
    assert made.data_ptr() % 64 == 0
    made.fill_(5.0)
    assert bool((like == 3.0).all())
    assert bool((made == 5.0).all())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_a_new_vector_takes_the_memory_of_one_that_is_gone():
    grown_kib = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    # Each of the sixty new vectors has 16 MiB; one may not find its place at once.
    assert int(grown_kib) < 3 * 16 * 1024
