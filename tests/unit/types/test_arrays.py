"""What kind of value something is, without importing the library that it may come from."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from tinkex.types.arrays import is_numpy, is_numpy_scalar, is_torch

if TYPE_CHECKING:
    import pytest


def test_a_library_that_another_thread_is_importing_has_no_values_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("numpy", "torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not is_numpy([1.0])
    assert not is_numpy_scalar(1.0)
    assert not is_torch([1.0])
