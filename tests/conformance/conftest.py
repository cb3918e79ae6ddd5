"""Fixtures of the conformance tests."""

from __future__ import annotations

import sys

import pytest
from interpreters import REPOSITORY, Interpreters


@pytest.fixture(scope="session")
def interpreters() -> Interpreters:
    root = REPOSITORY / ".venvs"
    if not any((root / name).exists() for name in ("conformance.stamp", "all.stamp")):
        # A failure, not a skip: `make` builds them, and a skipped comparison shows nothing.
        pytest.fail(f"run {sys.executable} tests/conformance/make_venvs.py first")
    return Interpreters(root)
