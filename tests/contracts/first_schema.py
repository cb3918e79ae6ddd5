"""The first schema of the store, for tests of the migrations that follow it.

Nothing is imported from the schema of today: this file says for ever what the first one was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

if TYPE_CHECKING:
    from sqlalchemy import Connection

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def text(name: str, *, nullable: bool = False, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable, primary_key=primary_key)


def time(name: str, *, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double[float](), nullable=nullable)


def whole(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False)


def number(name: str = "number", *, counts: bool = True) -> sa.Column[int]:
    return sa.Column(name, NUMBER, primary_key=True, autoincrement=counts)


def blob(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(), nullable=False)


def index(
    op: Operations,
    table: str,
    *columns: str,
    name: str | None = None,
    where: str | None = None,
) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(
        f"{table}_{name or columns[0]}",
        table,
        list(columns),
        sqlite_where=condition,
        postgresql_where=condition,
    )


def create_first_schema(connection: Connection) -> None:
    """Make the tables of version 0001 in an empty database."""
    op = Operations(MigrationContext.configure(connection))
    sessions_and_weights(op)
    work(op)
    ledger(op)


def sessions_and_weights(op: Operations) -> None:
    op.create_table(
        "sessions",
        text("session_id", primary_key=True),
        text("owner"),
        time("created_at"),
        time("last_seen_at"),
        text("sdk_version"),
        text("tags"),
        text("user_metadata"),
        text("project_id", nullable=True),
        text("display_name", nullable=True),
        flag("heartbeats"),
        text("status"),
        flag("active"),
    )
    index(op, "sessions", "owner")
    index(op, "sessions", "session_id", name="active", where="active")
    op.create_table(
        "models",
        number(),
        text("model_id"),
        text("owner"),
        text("session_id"),
        text("base_model"),
        text("lora"),
        text("optimizer"),
        time("created_at"),
        time("last_request_at"),
        text("user_metadata"),
        text("project_id", nullable=True),
        flag("corrupted"),
        text("snapshot_location", nullable=True),
        whole("snapshot_seq"),
        sa.UniqueConstraint("model_id", name="models_model_id"),
    )
    index(op, "models", "owner")
    index(op, "models", "session_id")
    op.create_table(
        "samplers",
        number(),
        text("sampler_id"),
        text("owner"),
        text("session_id"),
        text("base_model"),
        time("created_at"),
        text("model_path", nullable=True),
        text("snapshot", nullable=True),
        text("location", nullable=True),
        text("model_id", nullable=True),
        whole("seq_id", nullable=True),
        whole("copies"),
        sa.UniqueConstraint("sampler_id", name="samplers_sampler_id"),
    )
    index(op, "samplers", "session_id")
    index(op, "samplers", "location")
    op.create_table(
        "checkpoints",
        number(),
        text("path"),
        text("owner"),
        text("model_id"),
        text("kind"),
        text("name"),
        text("location"),
        text("base_model"),
        text("lora"),
        text("optimizer"),
        flag("has_optimizer"),
        time("created_at"),
        whole("size_bytes"),
        flag("public"),
        text("user_metadata", nullable=True),
        time("expires_at", nullable=True),
        text("project_id", nullable=True),
        sa.UniqueConstraint("path", name="checkpoints_path"),
    )
    index(op, "checkpoints", "owner")
    index(op, "checkpoints", "model_id")
    index(op, "checkpoints", "expires_at")
    op.create_table(
        "losses",
        text("loss_id", primary_key=True),
        text("owner"),
        text("session_id"),
        text("inputs"),
        text("graph"),
    )


def work(op: Operations) -> None:
    op.create_table(
        "operations",
        number(),
        text("op_id"),
        text("kind"),
        text("owner"),
        text("session_id"),
        time("created_at"),
        text("media"),
        whole("seq_id"),
        text("model_id", nullable=True),
        text("sampler_id", nullable=True),
        whole("clone"),
        text("sequence_ids"),
        text("state"),
        time("started_at", nullable=True),
        time("finished_at", nullable=True),
        whole("size_bytes", nullable=True),
        text("error", nullable=True),
        text("category", nullable=True),
        text("usage", nullable=True),
        sa.UniqueConstraint("op_id", name="operations_op_id"),
    )
    index(op, "operations", "session_id")
    index(op, "operations", "finished_at")
    index(op, "operations", "model_id", "state", "seq_id")
    index(op, "operations", "number", name="unfinished", where="state != 'done'")
    op.create_table(
        "bodies",
        number(counts=False),
        text("model_id", nullable=True),
        whole("seq_id"),
        blob("body"),
    )
    index(op, "bodies", "model_id", "seq_id")
    op.create_table("results", number(counts=False), time("finished_at"), blob("body"))
    index(op, "results", "finished_at")


def ledger(op: Operations) -> None:
    op.create_table(
        "answers", text("owner", primary_key=True), text("key", primary_key=True), text("answer")
    )
    op.create_table(
        "api_keys",
        number("key_id"),
        text("key_hash"),
        text("owner"),
        text("name"),
        time("created_at"),
        text("note"),
        time("revoked_at", nullable=True),
        sa.UniqueConstraint("key_hash", name="api_keys_key_hash"),
    )
    index(op, "api_keys", "owner")
    op.create_table(
        "audit", number(), time("at"), text("owner"), text("topic"), text("event"), text("details")
    )
    index(op, "audit", "owner")
    op.create_table(
        "usage",
        number(),
        time("at"),
        text("owner"),
        text("session_id"),
        text("base_model", nullable=True),
        text("project_id", nullable=True),
        text("kind"),
        whole("prompt_tokens"),
        whole("cached_tokens"),
        whole("generated_tokens"),
        whole("trained_tokens"),
        time("queue_s", nullable=True),
        time("device_s", nullable=True),
    )
    index(op, "usage", "owner", "at")
