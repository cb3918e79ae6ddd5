"""Indexes for what is alive, so that no query reads what ended long ago."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tinkex.clock import SystemClock

revision = "0003"
down_revision = "0002"

OPEN = "(snapshot_seq < 0 OR snapshot_location IS NOT NULL)"


def upgrade() -> None:
    add_columns()
    replace_indexes()
    add_indexes()
    close_copies()
    drop_samplers()
    date_answers()


def add_columns() -> None:
    none, zero = sa.Text(), sa.text("0")
    op.add_column("samplers", sa.Column("dropped", none, nullable=True))
    size = sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default=zero)
    op.add_column("samplers", size)
    at = sa.Column("created_at", sa.Double[float](), nullable=False, server_default=zero)
    op.add_column("answers", at)
    op.add_column("answers", sa.Column("session_id", none, nullable=True))


def replace_indexes() -> None:
    """The same names with more columns, or for fewer rows."""
    for name in (
        "sessions_owner",
        "sessions_active",
        "models_owner",
        "samplers_location",
        "checkpoints_owner",
        "checkpoints_model_id",
        "audit_owner",
    ):
        op.drop_index(name)
    index("sessions_owner", "owner", "created_at", "session_id")
    index("sessions_active", "owner", "heartbeats", where="active")
    index("models_owner", "owner", "number")
    index("samplers_location", "location", where="location IS NOT NULL")
    index("checkpoints_owner", "owner", "created_at", "number")
    index("checkpoints_model_id", "model_id", "created_at", "number")
    index("audit_owner", "owner", "at")


def add_indexes() -> None:
    index("sessions_unattended", "last_seen_at", where="active AND NOT heartbeats")
    index("sessions_over", "last_seen_at", where="NOT (active AND heartbeats)")
    index("models_project_id", "owner", "project_id", "number")
    index("models_open", "owner", where=OPEN)
    index("samplers_model_id", "model_id")
    unsaved = "snapshot IS NOT NULL AND location IS NULL AND dropped IS NULL"
    index("samplers_unsaved", "model_id", where=unsaved)
    index("samplers_sized", "owner", "size_bytes", where="size_bytes > 0")
    index("checkpoints_size_bytes", "owner", "expires_at", "size_bytes")
    index("checkpoints_public", "model_id", where="public")
    index("losses_session_id", "session_id")
    index("answers_session_id", "session_id", where="session_id IS NOT NULL")
    index("answers_created_at", "created_at", where="session_id IS NULL")


def index(name: str, *columns: str, where: str | None = None) -> None:
    table, condition = name.partition("_")[0], None if where is None else sa.text(where)
    op.create_index(name, table, list(columns), sqlite_where=condition, postgresql_where=condition)


def close_copies() -> None:
    """Runs of imports and copies never ran an operation; they were stored as open models."""
    op.execute("""
        UPDATE models SET snapshot_seq = 0
        WHERE snapshot_seq < 0 AND snapshot_location IS NULL
        AND NOT EXISTS (SELECT 1 FROM operations WHERE operations.model_id = models.model_id)
        AND (
            session_id LIKE 'import-%' OR session_id LIKE 'copy-%'
            OR EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.model_id = models.model_id)
        )
    """)


def drop_samplers() -> None:
    """Samplers of sessions that are over, and of models that were unloaded, have no weights."""
    op.execute("""
        UPDATE samplers SET dropped = 'its session is over',
            location = CASE WHEN snapshot IS NULL THEN NULL ELSE location END
        WHERE EXISTS (
            SELECT 1 FROM sessions
            WHERE sessions.session_id = samplers.session_id AND NOT sessions.active
        )
    """)
    op.execute(f"""
        UPDATE samplers SET dropped = 'its model was unloaded'
        WHERE snapshot IS NOT NULL AND location IS NULL AND dropped IS NULL
        AND EXISTS (
            SELECT 1 FROM models WHERE models.model_id = samplers.model_id AND NOT {OPEN}
        )
    """)


def date_answers() -> None:
    """Answers count as given now; those about lost samples belong to the sampler's session."""
    connection = op.get_bind()
    now = {"now": SystemClock().wall()}
    connection.execute(sa.text("UPDATE answers SET created_at = :now"), now)
    # samples:SESSION:sample:NUMBER:BLOCK
    rest = "substr(key, 9)"
    find = "strpos" if connection.dialect.name == "postgresql" else "instr"
    colon = f"{find}({rest}, ':')"
    op.execute(f"""
        UPDATE answers SET session_id = substr({rest}, 1, {colon} - 1)
        WHERE key LIKE 'samples_%_sample_%' AND {colon} > 1
    """)
