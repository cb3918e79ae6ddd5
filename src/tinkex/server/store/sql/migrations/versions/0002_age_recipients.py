"""Exports that are encrypted for the holders of some keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("age_recipients", sa.Text(), nullable=True))
