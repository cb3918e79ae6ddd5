"""The SQL of operations: a row each, their bodies and results beside them.

A row is `queued` until it is `done`. That an operation runs is known to the process that runs
it and is worth no write: after a restart it is not running.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, func, or_, select, update

from tinkex.server.store.records import Operation, Outcome
from tinkex.server.store.sql.records import insert_for
from tinkex.server.store.sql.schema import OPEN, UNFINISHED, bodies, models, operations, results
from tinkex.server.store.sql.shared import AT_ONCE
from tinkex.server.store.sql.usage import add_usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Connection, RowMapping, Select, TextClause

    from tinkex.server.store.records import UsageEntry

_OUTCOME = ("size_bytes", "error", "category", "usage")
# Of an Operation, what is not a column: the decoded request is never stored.
_ELSEWHERE = frozenset({"request", "body", "outcome"})
_PLAIN = tuple(f.name for f in fields(Operation) if f.name not in _ELSEWHERE)
_COLUMNS = [operations.c[name] for name in (*_PLAIN, *_OUTCOME)]
_NO_BODY = b""


# The statements of every training step are built once: building costs more than running them.
_SUBMIT = {
    dialect: insert_for(dialect, operations)
    .on_conflict_do_nothing(index_elements=["op_id"])
    .returning(operations.c.number)
    for dialect in ("sqlite", "postgresql")
}
_KEEP_BODY = bodies.insert()
_TOUCH_MODEL = (
    update(models)
    .where(models.c.model_id == bindparam("id"))
    .values(last_request_at=bindparam("at"))
)
_GET = (
    select(*_COLUMNS, bodies.c.body, results.c.body.label("result"))
    .select_from(
        operations.outerjoin(bodies, bodies.c.number == operations.c.number).outerjoin(
            results, results.c.number == operations.c.number
        )
    )
    .where(operations.c.op_id == bindparam("id"))
)
_FINISH = (
    update(operations)
    .where(operations.c.op_id == bindparam("id"), operations.c.state != "done")
    .values(
        {name: bindparam(name) for name in ("state", "started_at", "finished_at", *_OUTCOME)},
    )
    .returning(operations.c.number, operations.c.model_id)
)
_KEEP_RESULT = results.insert()


def submit(connection: Connection, operation: Operation) -> Operation:
    """Keep an operation and its body, or find the one that has its id."""
    values = {name: getattr(operation, name) for name in _PLAIN}
    query = _SUBMIT[connection.dialect.name]
    number = connection.execute(query, {**values, "state": "queued"}).scalar_one_or_none()
    if number is None:
        return _known(connection, operation.op_id)
    if operation.body:
        key = {"number": number, "model_id": operation.model_id, "seq_id": operation.seq_id}
        connection.execute(_KEEP_BODY, {**key, "body": operation.body})
    connection.execute(_TOUCH_MODEL, {"id": operation.model_id, "at": operation.created_at})
    return operation


def _known(connection: Connection, op_id: str) -> Operation:
    known = get(connection, op_id)
    assert known is not None  # the insert has just met it
    return known


def get(connection: Connection, op_id: str) -> Operation | None:
    """One operation: an unfinished one with its body, a finished one with its result."""
    row = connection.execute(_GET, {"id": op_id}).mappings().one_or_none()
    if row is None:
        return None
    return _read(row, body=row["body"] if row["state"] != "done" else None, result=row["result"])


def unfinished(connection: Connection) -> Sequence[Operation]:
    """Everything accepted and not finished, with bodies, in order of arrival."""
    query = _with_bodies(UNFINISHED).order_by(operations.c.number)
    return [_read(row, body=row["body"]) for row in connection.execute(query).mappings()]


def of_session(connection: Connection, session_id: str) -> Sequence[Operation]:
    """The operations of a session without payloads, in order of arrival."""
    query = select(*_COLUMNS).where(operations.c.session_id == session_id)
    rows = connection.execute(query.order_by(operations.c.number)).mappings()
    return [_read(row) for row in rows]


def journal(connection: Connection, model_id: str, after: int) -> Sequence[Operation]:
    """The operations of a model with their bodies, without results."""
    ours = (operations.c.model_id == model_id) & (operations.c.seq_id > after)
    query = _with_bodies(ours).order_by(operations.c.seq_id)
    return [_read(row, body=row["body"]) for row in connection.execute(query).mappings()]


def trim(connection: Connection, model_id: str, through: int) -> None:
    """Forget the bodies of a model's finished operations up to a seq_id."""
    waiting = select(operations.c.number).where(operations.c.number == bodies.c.number, UNFINISHED)
    connection.execute(
        delete(bodies).where(
            bodies.c.model_id == model_id,
            bodies.c.seq_id <= through,
            ~waiting.exists(),
        )
    )


def last_turn(connection: Connection, model_id: str) -> int:
    """The highest finished seq_id of a model, -1 when there is none."""
    query = select(func.max(operations.c.seq_id)).where(
        operations.c.model_id == model_id, operations.c.state == "done"
    )
    found = connection.execute(query).scalar_one()
    return -1 if found is None else found


def last_turns(connection: Connection) -> dict[str, int]:
    """The highest finished seq_id of every model that has one."""
    query = (
        select(operations.c.model_id, func.max(operations.c.seq_id))
        .where(operations.c.model_id.is_not(None), operations.c.state == "done")
        .group_by(operations.c.model_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when an operation ended."""

    op_id: str
    outcome: Outcome
    started_at: float | None
    finished_at: float
    usage: UsageEntry | None = None

    def write(self, connection: Connection) -> bool:
        """End the operation, unless it has ended; what it used counts in the same moment."""
        outcome = {name: getattr(self.outcome, name) for name in _OUTCOME}
        times = {"started_at": self.started_at, "finished_at": self.finished_at}
        values = {"id": self.op_id, "state": "done", **times, **outcome}
        row = connection.execute(_FINISH, values).one_or_none()
        if row is None:
            return False
        if self.outcome.body is not None:
            values = {"number": row.number, "finished_at": self.finished_at}
            connection.execute(_KEEP_RESULT, {**values, "body": self.outcome.body})
        if row.model_id is None:
            # Nothing replays what belongs to no model.
            connection.execute(delete(bodies).where(bodies.c.number == row.number))
        if self.usage is not None:
            add_usage(connection, self.usage)
        return True

    def applied_to(self, operation: Operation) -> Operation:
        """The operation after it."""
        return replace(
            operation,
            state="done",
            outcome=self.outcome,
            finished_at=self.finished_at,
            request=None,
            body=_NO_BODY,
        )


def drop_results(connection: Connection, op_ids: Sequence[str]) -> None:
    """Forget the payloads of these."""
    for start in range(0, len(op_ids), AT_ONCE):
        some = op_ids[start : start + AT_ONCE]
        numbers = select(operations.c.number).where(operations.c.op_id.in_(some))
        connection.execute(delete(results).where(results.c.number.in_(numbers)))


def drop_results_before(connection: Connection, at: float) -> int:
    """Forget the payloads of some of what finished before a time."""
    old = select(results.c.number).where(results.c.finished_at < at).limit(AT_ONCE)
    return connection.execute(delete(results).where(results.c.number.in_(old))).rowcount


def forget_before(connection: Connection, at: float) -> int:
    """Forget some of what finished before a time and no journal or open model needs."""
    later = operations.alias()
    last_turn = (
        select(func.max(later.c.seq_id))
        .where(later.c.model_id == operations.c.model_id, later.c.state == "done")
        .scalar_subquery()
    )
    needed = select(bodies.c.number).where(bodies.c.number == operations.c.number).exists()
    counts = select(models.c.number).where(models.c.model_id == operations.c.model_id, OPEN)
    old = select(operations.c.number).where(
        operations.c.finished_at < at,
        ~needed,
        or_(operations.c.seq_id < last_turn, ~counts.exists()),
    )
    numbers = connection.execute(old.limit(AT_ONCE)).scalars().all()
    forget(connection, numbers)
    return len(numbers)


def forget(connection: Connection, numbers: Sequence[int]) -> None:
    """Forget operations with all they have; at most `AT_ONCE`."""
    for table in (results, bodies, operations):
        connection.execute(delete(table).where(table.c.number.in_(numbers)))


def _with_bodies(condition: ColumnElement[bool] | TextClause) -> Select[Any]:
    beside = operations.outerjoin(bodies, bodies.c.number == operations.c.number)
    return select(*_COLUMNS, bodies.c.body).select_from(beside).where(condition)


def _read(row: RowMapping, *, body: bytes | None = None, result: bytes | None = None) -> Operation:
    outcome = None
    if row["state"] == "done":
        outcome = Outcome(body=result, **{name: row[name] for name in _OUTCOME})
    plain = {name: row[name] for name in _PLAIN}
    return Operation(**plain, body=body or _NO_BODY, outcome=outcome)
