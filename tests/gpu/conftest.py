"""Tests that need a CUDA device: `make gpu`. Elsewhere this folder has no tests."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
