"""The whole table of kernels against the reference, as it is tried before a decoder uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG
from tinkex.engine.backends.choose import disagreement
from tinkex.engine.backends.cuda import CUDA


@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_kernel_of_the_table_agrees_with_the_reference(device: str, qk_norm: bool) -> None:
    config = replace(CONFIG, qk_norm=qk_norm)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    assert disagreement(CUDA, config, dtype=dtype, device=torch.device(device)) is None
