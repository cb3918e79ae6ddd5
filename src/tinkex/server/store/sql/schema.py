"""The tables. A changed table needs a numbered migration and a new `VERSION`.

Bodies and results have tables of their own: SQLite rewrites a whole row when one of its
columns changes, and most questions about operations are not about their payloads.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    Boolean,
    Column,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
)

from tinkex.server.store.sql.columns import NUMBER, TIME, WHOLE, Json, PlainText
from tinkex.types import (
    CustomLossGraph,
    CustomLossInput,
    LoraConfig,
    OptimizerConfig,
    SessionStatus,
    Usage,
)

VERSION: Final = "0002"
"""The newest migration: what a new database starts with."""

METADATA = MetaData()


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, PlainText, nullable=null)


def _json(name: str, kind: Any, *, null: bool = False) -> Column[Any]:
    return Column(name, Json(kind), nullable=null)


def _time(name: str, *, null: bool = False) -> Column[float]:
    return Column(name, TIME, nullable=null)


def _whole(name: str, *, null: bool = False) -> Column[int]:
    return Column(name, WHOLE, nullable=null)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def _number() -> Column[int]:
    """Order of arrival."""
    return Column("number", NUMBER, primary_key=True, autoincrement=True)


# As Alembic makes it.
version = Table(
    "schema_version",
    METADATA,
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="schema_version_pkc"),
)

sessions = Table(
    "sessions",
    METADATA,
    Column("session_id", PlainText, primary_key=True),
    _text("owner"),
    _time("created_at"),
    _time("last_seen_at"),
    _text("sdk_version"),
    _json("tags", tuple[str, ...]),
    _json("user_metadata", dict[str, Any]),
    _text("project_id", null=True),
    _text("display_name", null=True),
    _flag("heartbeats"),
    _json("status", SessionStatus),
    _flag("active"),
    Index("sessions_owner", "owner"),
)
Index(
    "sessions_active",
    sessions.c.session_id,
    sqlite_where=sessions.c.active,
    postgresql_where=sessions.c.active,
)

models = Table(
    "models",
    METADATA,
    _number(),
    _text("model_id"),
    _text("owner"),
    _text("session_id"),
    _text("base_model"),
    _json("lora", LoraConfig),
    _json("optimizer", OptimizerConfig),
    _time("created_at"),
    _time("last_request_at"),
    _json("user_metadata", dict[str, Any]),
    _text("project_id", null=True),
    _flag("corrupted"),
    _text("snapshot_location", null=True),
    _whole("snapshot_seq"),
    UniqueConstraint("model_id", name="models_model_id"),
    Index("models_owner", "owner"),
    Index("models_session_id", "session_id"),
)

samplers = Table(
    "samplers",
    METADATA,
    _number(),
    _text("sampler_id"),
    _text("owner"),
    _text("session_id"),
    _text("base_model"),
    _time("created_at"),
    _text("model_path", null=True),
    _text("snapshot", null=True),
    _text("location", null=True),
    _text("model_id", null=True),
    _whole("seq_id", null=True),
    Column("copies", WHOLE, nullable=False, default=0),
    UniqueConstraint("sampler_id", name="samplers_sampler_id"),
    Index("samplers_session_id", "session_id"),
    Index("samplers_location", "location"),
)

checkpoints = Table(
    "checkpoints",
    METADATA,
    _number(),
    _text("path"),
    _text("owner"),
    _text("model_id"),
    _text("kind"),
    _text("name"),
    _text("location"),
    _text("base_model"),
    _json("lora", LoraConfig),
    _json("optimizer", OptimizerConfig),
    _flag("has_optimizer"),
    _time("created_at"),
    _whole("size_bytes"),
    _flag("public"),
    _json("user_metadata", dict[str, Any], null=True),
    _time("expires_at", null=True),
    _text("project_id", null=True),
    _json("age_recipients", tuple[str, ...], null=True),
    UniqueConstraint("path", name="checkpoints_path"),
    Index("checkpoints_owner", "owner"),
    Index("checkpoints_model_id", "model_id"),
    Index("checkpoints_expires_at", "expires_at"),
)

losses = Table(
    "losses",
    METADATA,
    Column("loss_id", PlainText, primary_key=True),
    _text("owner"),
    _text("session_id"),
    _json("inputs", tuple[CustomLossInput, ...]),
    _json("graph", CustomLossGraph),
)

operations = Table(
    "operations",
    METADATA,
    _number(),
    _text("op_id"),
    _text("kind"),
    _text("owner"),
    _text("session_id"),
    _time("created_at"),
    _text("media"),
    _whole("seq_id"),
    _text("model_id", null=True),
    _text("sampler_id", null=True),
    _whole("clone"),
    _json("sequence_ids", tuple[str, ...]),
    _text("state"),
    _time("started_at", null=True),
    _time("finished_at", null=True),
    # The outcome, once there is one.
    _whole("size_bytes", null=True),
    _text("error", null=True),
    _text("category", null=True),
    _json("usage", Usage, null=True),
    UniqueConstraint("op_id", name="operations_op_id"),
    Index("operations_session_id", "session_id"),
    Index("operations_finished_at", "finished_at"),
    Index("operations_model_id", "model_id", "state", "seq_id"),
)
_unfinished = operations.c.state != "done"
Index(
    "operations_unfinished",
    operations.c.number,
    sqlite_where=_unfinished,
    postgresql_where=_unfinished,
)

bodies = Table(
    "bodies",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    _text("model_id", null=True),
    _whole("seq_id"),
    Column("body", LargeBinary, nullable=False),
    Index("bodies_model_id", "model_id", "seq_id"),
)

results = Table(
    "results",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    _time("finished_at"),
    Column("body", LargeBinary, nullable=False),
    Index("results_finished_at", "finished_at"),
)

answers = Table(
    "answers",
    METADATA,
    Column("owner", PlainText, primary_key=True),
    Column("key", PlainText, primary_key=True),
    _text("answer"),
)

api_keys = Table(
    "api_keys",
    METADATA,
    Column("key_id", NUMBER, primary_key=True, autoincrement=True),
    _text("key_hash"),
    _text("owner"),
    _text("name"),
    _time("created_at"),
    _text("note"),
    _time("revoked_at", null=True),
    UniqueConstraint("key_hash", name="api_keys_key_hash"),
    Index("api_keys_owner", "owner"),
)

audit = Table(
    "audit",
    METADATA,
    _number(),
    _time("at"),
    _text("owner"),
    _text("topic"),
    _text("event"),
    _json("details", dict[str, Any]),
    Index("audit_owner", "owner"),
)

usage = Table(
    "usage",
    METADATA,
    _number(),
    _time("at"),
    _text("owner"),
    _text("session_id"),
    _text("base_model", null=True),
    _text("project_id", null=True),
    _text("kind"),
    _whole("prompt_tokens"),
    _whole("cached_tokens"),
    _whole("generated_tokens"),
    _whole("trained_tokens"),
    _time("queue_s", null=True),
    _time("device_s", null=True),
    Index("usage_owner", "owner", "at"),
)
