"""How long tests wait for something that must come."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0
"""Some of it takes milliseconds on a quiet machine; a busy one may need a hundred times as long.

Less than pytest's own limit in `pyproject.toml`, so that a test fails where it waits.
"""
