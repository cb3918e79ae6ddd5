"""The first schema: the version that later migrations start from.

A new database gets today's tables at once, so none is ever migrated to this version. What it was is
in tests/contracts/first_schema.py.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: a database of this version has its tables."""
