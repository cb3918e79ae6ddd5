"""Keys with limits, an audit log that says who and from where, and sizes for one quota."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tinkex.server.store.sql.kept import counts, triggers

revision = "0004"
down_revision = "0003"

_ZERO, _EMPTY = sa.text("0"), sa.text("''")


def upgrade() -> None:
    limit_keys()
    describe_audit()
    add_sizes()
    fill_sizes()
    count_rows()


def limit_keys() -> None:
    false = sa.text("FALSE")
    op.add_column(
        "api_keys", sa.Column("read_only", sa.Boolean(), nullable=False, server_default=false)
    )
    op.add_column("api_keys", sa.Column("project_id", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("routes", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("expires_at", sa.Double[float](), nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", sa.Double[float](), nullable=True))


def describe_audit() -> None:
    op.add_column("audit", sa.Column("key_id", sa.BigInteger(), nullable=True))
    for name in ("address", "request_id"):
        op.add_column("audit", sa.Column(name, sa.Text(), nullable=False, server_default=_EMPTY))
    op.create_index("audit_at", "audit", ["at"])


def add_sizes() -> None:
    whole = sa.BigInteger()
    for table in ("sessions", "models", "checkpoints"):
        op.add_column(table, sa.Column("row_bytes", whole, nullable=False, server_default=_ZERO))
    for table in ("bodies", "results"):
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=False, server_default=_EMPTY))
    for table in ("losses", "bodies", "results"):
        op.add_column(table, sa.Column("size_bytes", whole, nullable=False, server_default=_ZERO))
    for table in ("bodies", "results"):
        op.create_index(f"{table}_owner", table, ["owner", "size_bytes"])
    project = ["owner", "project_id", "created_at"]
    op.create_index("sessions_project_id", "sessions", [*project, "session_id"])
    op.create_index("checkpoints_project_id", "checkpoints", [*project, "number"])


def count_rows() -> None:
    """One row per owner and part; from here on triggers keep it right."""
    op.create_table(
        "kept",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "part", name="kept_pkc"),
    )
    for statement in (*counts(), *triggers(op.get_bind().dialect.name)):
        op.execute(statement)


def fill_sizes() -> None:
    """What is there already counts, too."""
    for table in ("sessions", "models", "checkpoints"):
        op.execute(f"UPDATE {table} SET row_bytes = 512 + coalesce(length(user_metadata), 0)")
    op.execute("UPDATE losses SET size_bytes = length(inputs) + length(graph)")
    for table in ("bodies", "results"):
        owner = f"SELECT owner FROM operations WHERE operations.number = {table}.number"
        op.execute(f"UPDATE {table} SET size_bytes = length(body), owner = coalesce(({owner}), '')")
