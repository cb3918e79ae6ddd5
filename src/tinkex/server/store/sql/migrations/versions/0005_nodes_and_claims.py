"""Nodes with leases, claims of nodes on keys, and the epoch under which an operation finished."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("operations", whole("epoch", nullable=True))
    op.create_table(
        "cluster",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=False),
        text("name"),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        *(text(name) for name in ("node_id", "name", "url")),
        whole("version"),
        *(text(name) for name in ("release", "role", "base_models", "state")),
        time("joined_at"),
        time("lease_until"),
        time("ended_at", nullable=True),
        text("load"),
        sa.UniqueConstraint("node_id", name="nodes_node_id"),
    )
    op.create_table(
        "claims",
        sa.Column("key", sa.Text(), primary_key=True),
        text("node_id"),
        whole("epoch"),
        text("owner"),
        text("base_model"),
        time("since"),
        text("wanted", nullable=True),
    )
    op.create_index("claims_node_id", "claims", ["node_id"])


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def time(name: str, *, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double[float](), nullable=nullable)


def whole(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)
