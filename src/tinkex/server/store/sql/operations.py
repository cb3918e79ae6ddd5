"""The SQL of operations: a row each, their bodies and results beside them.

A row is `queued` until it is `done`. That an operation runs is known to the process that runs
it and is worth no write: after a restart it is not running. What training used has a row per
operation; samples are too many for that and have one per hour of a session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    and_,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    or_,
    select,
    update,
)

from tinkex.server.store.records import (
    HOUR_S,
    HourOfUsage,
    Operation,
    OperationOutcome,
    UsageEntry,
    changed,
)
from tinkex.server.store.sql.database import AT_ONCE
from tinkex.server.store.sql.overflow import ROOM_BYTES, clear
from tinkex.server.store.sql.records import insert_for
from tinkex.server.store.sql.schema import OPEN, UNFINISHED, bodies, models, operations, results
from tinkex.server.store.sql.schema import usage as usage_table
from tinkex.server.store.sql.state import StoreState
from tinkex.server.store.sql.tenure import HELD
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, RowMapping, Select, TextClause

    from tinkex.server.store.sql.tenure import Tenure

_OUTCOME = ("size_bytes", "error", "category", "usage")
# Of an Operation, what is not a column: the decoded request is never stored.
_ELSEWHERE = frozenset({"request", "body", "outcome"})
_PLAIN = tuple(name for name in Operation.__struct_fields__ if name not in _ELSEWHERE)
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
    .returning(operations.c.number, operations.c.model_id, operations.c.owner)
)
# On a node: only under its claim, which it records.
_FINISH_AS_OWNER = _FINISH.where(HELD).values(epoch=bindparam("claim_epoch"))
_KEEP_RESULT = results.insert()

_WHO = ("owner", "session_id", "base_model", "project_id", "kind")
_AMOUNTS = tuple(Usage.__struct_fields__)
_TIMES = ("queue_s", "device_s")


def submit(connection: Connection, operation: Operation, tenure: Tenure | None = None) -> Operation:
    """Keep an operation and its body, or find the one that has its id."""
    if tenure is not None:
        tenure.check(connection)
    values = {name: getattr(operation, name) for name in _PLAIN}
    query = _SUBMIT[connection.dialect.name]
    number = connection.execute(query, {**values, "state": "queued"}).scalar_one_or_none()
    if number is None:
        return _known(connection, operation.op_id)
    if operation.body:
        key = {"number": number, "model_id": operation.model_id, "seq_id": operation.seq_id}
        size = {"owner": operation.owner, "size_bytes": len(operation.body)}
        connection.execute(_KEEP_BODY, {**key, **size, "body": operation.body})
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


def unfinished(connection: Connection, model_id: str | None = None) -> Sequence[Operation]:
    """Everything accepted and not finished, or of one model; with bodies, in order of arrival."""
    query = _with_bodies(UNFINISHED).order_by(operations.c.number)
    if model_id is not None:
        query = query.where(operations.c.model_id == model_id)
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


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when an operation ended."""

    op_id: str
    outcome: OperationOutcome
    started_at: float | None
    finished_at: float
    usage: UsageEntry | None = None
    tenure: Tenure | None = None

    def write(self, connection: Connection) -> bool:
        """End the operation, unless it has ended; what it used counts in the same moment."""
        row = self._update(connection)
        if row is None:
            if self.tenure is not None:
                self.tenure.check(connection)
            return False
        if self.outcome.body is not None:
            values = {"number": row.number, "finished_at": self.finished_at, "owner": row.owner}
            body = {"body": self.outcome.body, "size_bytes": len(self.outcome.body)}
            connection.execute(_KEEP_RESULT, {**values, **body})
        if row.model_id is None:
            # Nothing replays what belongs to no model.
            connection.execute(delete(bodies).where(bodies.c.number == row.number))
        if self.usage is not None:
            add_usage(connection, self.usage)
        return True

    def _update(self, connection: Connection) -> Any:
        outcome = {name: getattr(self.outcome, name) for name in _OUTCOME}
        times = {"started_at": self.started_at, "finished_at": self.finished_at}
        values = {"id": self.op_id, "state": "done", **times, **outcome}
        if self.tenure is None:
            return connection.execute(_FINISH, values).one_or_none()
        values |= self.tenure.parameters
        return connection.execute(_FINISH_AS_OWNER, values).one_or_none()

    def applied_to(self, operation: Operation) -> Operation:
        """The operation after it."""
        return changed(
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
        outcome = OperationOutcome(body=result, **{name: row[name] for name in _OUTCOME})
    plain = {name: row[name] for name in _PLAIN}
    return Operation(**plain, body=body or _NO_BODY, outcome=outcome)


class OperationQueries(StoreState):
    """The part of the store that knows operations and samples, and how they end.

    Every unfinished operation is in memory, and memory decides what is new and what has ended: a
    commit whose answer was lost is found in the database, but no client was answered.
    """

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        if operation.kind == "sample":
            return self._samples.submit(operation)
        known = await self._in_memory(operation.op_id)
        if known is not None:
            return known, False
        tenure = self._tenure(operation.model_id)
        return await self._database.write(lambda c: submit(c, operation, tenure), self._accepted)

    def _accepted(self, kept: Operation) -> tuple[Operation, bool]:
        first = self._open.get(kept.op_id)
        if first is not None or kept.state == "done":
            return first or kept, False
        self._open[kept.op_id] = kept
        model = self._model_cache.get(kept.model_id or "")
        if model is not None:
            touched = replace(model, last_request_at=kept.created_at)
            self._model_cache.amend(model.model_id, touched)
        return kept, True

    async def get_operation(self, op_id: str) -> Operation | None:
        sample = self._samples.get(op_id)
        if sample is not None:
            return await self._overflow.restored(sample)
        known = await self._in_memory(op_id)
        if known is not None:
            return known
        return await self._database.read(lambda c: get(c, op_id), self._found)

    def _found(self, operation: Operation | None) -> Operation | None:
        if operation is not None and operation.state == "done":
            self._finished.put(operation.op_id, operation)
        return operation and self._open.get(operation.op_id, operation)

    async def pending(self, key: str | None = None) -> Sequence[Operation]:
        await self._read_open()
        found = [*self._open.values(), *self._samples.pending()]
        return found if key is None else [op for op in found if self._key_of(op) == key]

    def _key_of(self, operation: Operation) -> str | None:
        """What a node owns to run an operation."""
        sampler_id = operation.sampler_id
        if operation.model_id is not None or sampler_id is None:
            return operation.model_id
        return self._sampler_keys.get(sampler_id, sampler_id)

    async def operations(self, session_id: str) -> Sequence[Operation]:
        found = await self._database.list(lambda c: of_session(c, session_id))
        return [*map(self._newest, found), *self._samples.of_session(session_id)]

    async def start(self, op_ids: Iterable[str], at: float) -> None:
        await self._read_open()
        for op_id in op_ids:
            self._samples.start(op_id, at)
            known = self._open.get(op_id)
            if known is not None and known.state == "queued":
                self._open[op_id] = changed(known, state="running", started_at=at)

    async def finish(
        self, op_id: str, outcome: OperationOutcome, at: float, usage: UsageEntry | None = None
    ) -> bool:
        sample = self._samples.get(op_id)
        if sample is not None:
            ended = sample.state == "done"
            return not ended and await self._finish_sample(sample, outcome, at, usage)
        await self._read_open()
        known = self._open.get(op_id)
        if known is None:
            return False
        tenure = self._tenure(known.model_id)
        ending = Ending(op_id, outcome, known.started_at, at, usage, tenure)
        # A success that a power cut undoes is reached again by running the operation again; an
        # operation that failed or was withdrawn must not run after all.
        write = self._database.write if outcome.error else self._database.write_lightly
        return await write(ending.write, partial(self._ended, ending))

    async def _finish_sample(
        self, sample: Operation, outcome: OperationOutcome, at: float, usage: UsageEntry | None
    ) -> bool:
        size_bytes = len(outcome.body or b"")
        if size_bytes and self._samples.result_bytes + size_bytes > ROOM_BYTES:
            await self._read_open()
            outcome = await self._overflow.keep(sample, outcome, at)
        first = self._samples.finish(sample.op_id, outcome, at)
        if first and usage is not None:
            self._behind.use(usage)
        return first

    def _ended(self, ending: Ending, written: bool) -> bool:
        known = self._open.pop(ending.op_id, None)
        if known is None:
            return False
        if written:
            self._finished.put(ending.op_id, ending.applied_to(known))
        return True

    async def journal(self, model_id: str, after: int) -> Sequence[Operation]:
        found = await self._database.read(lambda c: journal(c, model_id, after))
        return [self._newest(operation) for operation in found]

    async def trim_journal(self, model_id: str, through: int) -> None:
        tenure = self._tenure(model_id)

        def trim_owned(connection: Connection) -> None:
            if tenure is not None:
                tenure.check(connection)
            trim(connection, model_id, through)

        await self._database.write(trim_owned)

    async def last_turn(self, model_id: str) -> int:
        return await self._database.read(lambda c: last_turn(c, model_id))

    async def completions(
        self, sampler_id: str, clone: int, after: int
    ) -> tuple[Sequence[Operation], int]:
        return self._samples.completions(sampler_id, clone, after)

    async def drop_results(self, op_ids: Iterable[str]) -> None:
        op_ids = list(op_ids)
        self._samples.drop_results(op_ids)
        await self._overflow.drop(op_ids)
        others = [op_id for op_id in op_ids if self._samples.get(op_id) is None]
        if others:
            await self._database.write(
                lambda c: drop_results(c, others), lambda _: self._dropped(others)
            )

    async def drop_results_before(self, at: float) -> int:
        samples = self._samples.drop_results_before(at)
        old = partial(drop_results_before, at=at)
        return samples + await self._in_parts(old, at)

    async def forget_operations_before(self, at: float) -> int:
        samples = self._samples.forget_before(at)
        self._overflow.forget(self._samples.finished_ids())
        old = partial(forget_before, at=at)
        return samples + await self._in_parts(old, at)

    async def _in_parts(self, do: Callable[[Connection], int], at: float) -> int:
        """Forget in transactions of their own, so that others come in between."""
        total = count = await self._database.write(do, partial(self._dropped_before, at))
        while count:
            count = await self._database.write(do)
            total += count
        return total

    def _dropped(self, op_ids: Iterable[str]) -> None:
        for op_id in op_ids:
            self._finished.discard(op_id)

    def _dropped_before(self, at: float, count: int) -> int:
        self._dropped(
            op_id
            for op_id, operation in self._finished.items()
            if operation.finished_at is not None and operation.finished_at < at
        )
        return count

    async def _in_memory(self, op_id: str) -> Operation | None:
        await self._read_open()
        return self._open.get(op_id) or self._finished.get(op_id)

    def _newest(self, operation: Operation) -> Operation:
        return self._open.get(operation.op_id, operation)

    async def _read_open(self) -> None:
        """Read what earlier processes left unfinished, once."""
        if not self._open_read:
            await self._database.write(_read_unfinished, self._opened)

    def _opened(self, found: Sequence[Operation]) -> None:
        # Two calls at the start may both read; what memory has by then is newer.
        self._open_read = True
        for operation in found:
            self._open.setdefault(operation.op_id, operation)


def _read_unfinished(connection: Connection) -> Sequence[Operation]:
    clear(connection)
    return unfinished(connection)


def add_usage(connection: Connection, entry: UsageEntry) -> None:
    """Store one entry."""
    connection.execute(usage_table.insert().values(_values(entry)))


def add_hourly(connection: Connection, entries: Iterable[UsageEntry]) -> None:
    """Add each entry to its hour's row, which the first of them makes."""
    for entry in entries:
        sums = {name: _sum(name, getattr(entry.usage, name)) for name in _AMOUNTS}
        # Two nodes at once may make two rows; only the first of them is added to.
        first = select(func.min(usage_table.c.number)).where(_same_hour(entry)).scalar_subquery()
        query = update(usage_table).where(usage_table.c.number == first).values(sums)
        if connection.execute(query).rowcount == 0:
            add_usage(connection, entry)


def usage_between(
    connection: Connection, owner: str, start: float, end: float
) -> Sequence[HourOfUsage]:
    """What an owner used from `start` to before `end`, summed up by the database."""
    # A literal: PostgreSQL takes two parameters of one value for two groups.
    hours = usage_table.c.at / literal_column(f"{HOUR_S}.0")
    # A cast rounds in PostgreSQL, and not every SQLite has floor().
    whole = cast(hours if connection.dialect.name == "sqlite" else func.floor(hours), BigInteger)
    group = [whole.label("hour"), *(usage_table.c[name] for name in _WHO if name != "owner")]
    sums = [func.sum(usage_table.c[name]).label(name) for name in _AMOUNTS]
    query = (
        select(*group, func.count().label("count"), *sums)
        .where(usage_table.c.owner == owner, usage_table.c.at >= start, usage_table.c.at < end)
        .group_by(*group)
        .order_by("hour", usage_table.c.session_id, usage_table.c.kind)
    )
    return [_hour_of_usage(row) for row in connection.execute(query).mappings()]


def _hour_of_usage(row: RowMapping) -> HourOfUsage:
    # A sum of whole numbers is a decimal in PostgreSQL.
    amounts = {name: row[name] for name in _TIMES}
    amounts |= {name: int(row[name]) for name in _AMOUNTS if name not in _TIMES}
    return HourOfUsage(
        hour=row["hour"] * HOUR_S,
        **{name: row[name] for name in _WHO if name != "owner"},
        count=row["count"],
        usage=Usage(**amounts),
    )


def _values(entry: UsageEntry) -> dict[str, Any]:
    who = {name: getattr(entry, name) for name in _WHO}
    amounts = {name: getattr(entry.usage, name) for name in _AMOUNTS}
    return {"at": entry.at, **who, **amounts}


def _same_hour(entry: UsageEntry) -> ColumnElement[bool]:
    start = entry.at // HOUR_S * HOUR_S
    # Compared by `=`, because only that uses the index in PostgreSQL.
    ours = usage_table.c.owner == entry.owner
    who = (usage_table.c[name].is_not_distinct_from(getattr(entry, name)) for name in _WHO)
    return and_(ours, usage_table.c.at >= start, usage_table.c.at < start + HOUR_S, *who)


def _sum(name: str, more: float | None) -> object:
    """What is known of both; unknown only when neither is."""
    column = usage_table.c[name]
    return column if more is None else func.coalesce(column + more, more)
