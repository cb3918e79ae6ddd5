"""The tables. A changed table needs a numbered migration and a new `VERSION`.

Every column takes and returns the field's own Python value, so a row and a record have the same
names and the queries convert nothing. Bodies and results have tables of their own: SQLite rewrites
a whole row when one of its columns changes, and most queries of operations need no payloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from tinkex.server.store.ownership import NodeLoad, NodeModel
from tinkex.types import (
    CustomLossGraph,
    CustomLossInput,
    LoraConfig,
    OptimizerConfig,
    SessionStatus,
    Usage,
)
from tinkex.types.optimizers import optimizer_config
from tinkex.types.value import Value

if TYPE_CHECKING:
    from sqlalchemy import Dialect, TextClause

TIME: Double[float] = Double()
WHOLE = BigInteger()
# SQLite numbers rows only in a column whose type is exactly INTEGER.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")


class PlainText(TypeDecorator[str]):
    """Text that both databases can hold.

    PostgreSQL refuses NUL and no database takes half a surrogate pair. Neither is part of any
    id of this server, so what a client sends of them is stored as a visible character.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\u2400").encode(errors="replace").decode()


class Json(TypeDecorator[Any]):
    """A structured field as JSON text. `kind` is the field's type."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if isinstance(value, Value):
            return value.model_dump_json()
        plain = msgspec.json.encode(value, enc_hook=_plain)
        return plain.decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if self.kind is OptimizerConfig:
            return optimizer_config(msgspec.json.decode(value), "optimizer")
        return msgspec.json.decode(value, type=self.kind)


def _plain(value: object) -> object:
    return dict(cast("Any", value))  # the one other thing a record holds: any Mapping


VERSION: Final = "0006"
"""The newest migration: what a new database starts with."""

METADATA = MetaData()

# The conditions of the partial indexes, as text because a query uses such an index only where it
# repeats the condition exactly; SQLAlchemy would write `active = 1`, and a literal as a parameter.
ACTIVE = text("active")
UNATTENDED = text("active AND NOT heartbeats")
OVER = text("NOT (active AND heartbeats)")
OPEN = text("(snapshot_seq < 0 OR snapshot_location IS NOT NULL)")
LOCATED = text("location IS NOT NULL")
UNSAVED = text("snapshot IS NOT NULL AND location IS NULL AND dropped IS NULL")
SIZED = text("size_bytes > 0")
PUBLIC = text("public")
UNFINISHED = text("state != 'done'")
OF_A_SESSION = text("session_id IS NOT NULL")
OF_NO_SESSION = text("session_id IS NULL")


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


def _row_bytes() -> Column[int]:
    """What the record's texts take up, which counts towards its owner's quota."""
    return Column("row_bytes", WHOLE, nullable=False, server_default=text("0"))


def _size_bytes() -> Column[int]:
    """What its payload takes up, which counts towards its owner's quota."""
    return Column("size_bytes", WHOLE, nullable=False, server_default=text("0"))


def _owner() -> Column[str]:
    """Whose quota it counts towards."""
    return Column("owner", PlainText, nullable=False, server_default=text("''"))


def _some(name: str, *columns: str, where: TextClause) -> Index:
    """A partial index."""
    return Index(name, *columns, sqlite_where=where, postgresql_where=where)


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
    _row_bytes(),
    Index("sessions_owner", "owner", "created_at", "session_id"),
    Index("sessions_project_id", "owner", "project_id", "created_at", "session_id"),
    _some("sessions_active", "owner", "heartbeats", where=ACTIVE),
    _some("sessions_unattended", "last_seen_at", where=UNATTENDED),
    _some("sessions_over", "last_seen_at", where=OVER),
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
    _row_bytes(),
    UniqueConstraint("model_id", name="models_model_id"),
    Index("models_owner", "owner", "number"),
    Index("models_project_id", "owner", "project_id", "number"),
    Index("models_session_id", "session_id"),
    _some("models_open", "owner", where=OPEN),
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
    _text("dropped", null=True),
    _size_bytes(),
    UniqueConstraint("sampler_id", name="samplers_sampler_id"),
    Index("samplers_session_id", "session_id"),
    Index("samplers_model_id", "model_id"),
    _some("samplers_location", "location", where=LOCATED),
    _some("samplers_unsaved", "model_id", where=UNSAVED),
    _some("samplers_sized", "owner", "size_bytes", where=SIZED),
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
    _row_bytes(),
    UniqueConstraint("path", name="checkpoints_path"),
    Index("checkpoints_owner", "owner", "created_at", "number"),
    Index("checkpoints_project_id", "owner", "project_id", "created_at", "number"),
    Index("checkpoints_size_bytes", "owner", "expires_at", "size_bytes"),
    Index("checkpoints_model_id", "model_id", "created_at", "number"),
    _some("checkpoints_public", "model_id", where=PUBLIC),
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
    _size_bytes(),
    Index("losses_session_id", "session_id"),
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
    # Of the claim under which a node finished it; none on a server that is not a node.
    _whole("epoch", null=True),
    UniqueConstraint("op_id", name="operations_op_id"),
    Index("operations_session_id", "session_id"),
    Index("operations_finished_at", "finished_at"),
    Index("operations_model_id", "model_id", "state", "seq_id"),
    _some("operations_unfinished", "number", where=UNFINISHED),
)

bodies = Table(
    "bodies",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    _text("model_id", null=True),
    _whole("seq_id"),
    Column("body", LargeBinary, nullable=False),
    _owner(),
    _size_bytes(),
    Index("bodies_model_id", "model_id", "seq_id"),
    Index("bodies_owner", "owner", "size_bytes"),
)

results = Table(
    "results",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    _time("finished_at"),
    Column("body", LargeBinary, nullable=False),
    _owner(),
    _size_bytes(),
    Index("results_finished_at", "finished_at"),
    Index("results_owner", "owner", "size_bytes"),
)

answers = Table(
    "answers",
    METADATA,
    Column("owner", PlainText, primary_key=True),
    Column("key", PlainText, primary_key=True),
    _text("answer"),
    # When it was given, and the session it is needed by, if it is a session's.
    Column("created_at", TIME, nullable=False, server_default=text("0")),
    _text("session_id", null=True),
    _some("answers_session_id", "session_id", where=OF_A_SESSION),
    _some("answers_created_at", "created_at", where=OF_NO_SESSION),
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
    Column("read_only", Boolean, nullable=False, server_default=text("FALSE")),
    _text("project_id", null=True),
    _json("routes", tuple[str, ...], null=True),
    _time("expires_at", null=True),
    _time("last_used_at", null=True),
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
    _whole("key_id", null=True),
    Column("address", PlainText, nullable=False, server_default=text("''")),
    Column("request_id", PlainText, nullable=False, server_default=text("''")),
    Index("audit_owner", "owner", "at"),
    Index("audit_at", "at"),
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

# The cluster that the database belongs to: one row, with number 1.
cluster = Table(
    "cluster",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    _text("name"),
    Column("secret", LargeBinary, nullable=False),
)

nodes = Table(
    "nodes",
    METADATA,
    _number(),
    _text("node_id"),
    _text("name"),
    _text("url"),
    _whole("version"),
    _text("release"),
    _text("role"),
    _json("base_models", tuple[NodeModel, ...]),
    _text("state"),
    _time("joined_at"),
    _time("lease_until"),
    _time("ended_at", null=True),
    _json("load", NodeLoad),
    UniqueConstraint("node_id", name="nodes_node_id"),
)

claims = Table(
    "claims",
    METADATA,
    Column("key", PlainText, primary_key=True),
    _text("node_id"),
    _whole("epoch"),
    _text("owner"),
    _text("base_model"),
    _time("since"),
    _text("wanted", null=True),
    Index("claims_node_id", "node_id"),
)

reservations = Table(
    "reservations",
    METADATA,
    Column("reservation_id", PlainText, primary_key=True),
    _text("node_id"),
    _text("owner"),
    _whole("size_bytes"),
    _whole("checkpoints"),
    Index("reservations_owner", "owner"),
)
