"""Which errors mean that memory ran out."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.failures import failure, is_memory


def _raised(inner: BaseException, outer: BaseException) -> BaseException:
    """An error that was raised while another one was handled, as an import does it."""
    outer.__context__ = inner
    return outer


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
        _raised(MemoryError(), ImportError("cannot import name 'x'")),
    ],
)
def test_memory_that_ran_out_is_recognised_wherever_it_did(error: BaseException) -> None:
    assert is_memory(error)
    assert "ran out of memory" in failure(error, "on a sequence", None).message


@pytest.mark.parametrize("error", [ValueError("no"), _raised(KeyError("a"), ImportError("b"))])
def test_other_errors_are_not_memory(error: BaseException) -> None:
    assert not is_memory(error)
    assert "failed on a sequence" in failure(error, "on a sequence", None).message
