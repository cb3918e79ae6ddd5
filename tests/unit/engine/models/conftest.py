from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Threads that wait for each other cost minutes when other tests use the cores as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
