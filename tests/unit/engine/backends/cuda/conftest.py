"""Kernel tests run compiled where there is CUDA, and in triton's interpreter elsewhere.

The interpreter is chosen in `tests/conftest.py`, before anything imports triton.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels under test run."""
    compiled = os.environ.get("TRITON_INTERPRET") != "1"
    assert compiled == torch.cuda.is_available(), "the interpreter is for machines without CUDA"
    return "cuda" if compiled else "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh tensors hold NaN, so an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _fixed_products() -> None:
    """Interpret `tl.dot` as sums over the terms, one after the other.

    The interpreter calls numpy's product, whose bits depend on the processor and on the shape. On a
    device they depend on neither, and kernels are tested for the order in which they use them.
    """
    from triton.runtime import interpreter

    def create_dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        left, right = (factor.data.astype(d.data.dtype) for factor in (a, b))
        total = d.data
        for term in range(left.shape[-1]):
            total = total + left[..., :, term, None] * right[..., None, term, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture(scope="session", autouse=True)
def _loop_bounds() -> None:
    """Let kernels loop up to a number they loaded, with numpy >= 2.4.

    Triton 3.6 interprets scalars as arrays of one element and takes `int` of them, which
    numpy no longer allows.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index
