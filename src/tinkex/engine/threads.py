"""How many threads of a CPU compute something."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def on_threads(count: int) -> Generator[None]:
    """Compute what this thread asks for on so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
