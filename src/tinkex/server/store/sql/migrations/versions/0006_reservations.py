"""Room in a tenant's quota that nodes of a cluster have reserved."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("reservation_id", sa.Text(), primary_key=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("node_id", "owner")),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("size_bytes", "checkpoints")
        ),
    )
    op.create_index("reservations_owner", "reservations", ["owner"])
