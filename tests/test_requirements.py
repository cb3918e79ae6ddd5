"""Every requirement row is shown by at least one test that carries its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = [f"S{n}" for n in range(1, 43)] + [f"B{n}" for n in range(1, 23)]


def _marked() -> set[str]:
    files = [path for path in HERE.rglob("test_*.py") if path != Path(__file__)]
    text = "\n".join(path.read_text() for path in files)
    marks = re.findall(r"mark\.req\(([^)]*)\)", text)
    return {name for mark in marks for name in re.findall(r"[SB]\d+", mark)}


@pytest.mark.parametrize("row", ROWS)
def test_the_row_has_a_test(row: str):
    assert row in _marked(), f"no test is marked @pytest.mark.req({row!r})"
