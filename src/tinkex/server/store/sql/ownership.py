"""Nodes and claims: who is alive, and which node owns which key.

All times are read in the statement itself from the database's clock; SQLite has none that a
statement could trust, so there the store's own clock counts.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import (
    Double,
    and_,
    delete,
    exists,
    inspect,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy import true as always
from sqlalchemy.exc import OperationalError

from tinkex.errors import StorageError
from tinkex.server.store.ownership import (
    MEMBER_STATES,
    Claim,
    LeaseLostError,
    Membership,
    Node,
    NodeLoad,
)
from tinkex.server.store.records import Reserved, occupied
from tinkex.server.store.sql.hints import notify
from tinkex.server.store.sql.kept import all_kept
from tinkex.server.store.sql.operations import unfinished
from tinkex.server.store.sql.overflow import forget_node
from tinkex.server.store.sql.records import insert
from tinkex.server.store.sql.schema import claims, cluster, nodes, reservations, samplers
from tinkex.server.store.sql.state import StoreState
from tinkex.server.store.sql.tenure import NodeFence, Tenure, lease_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, RowMapping, Select

    from tinkex.server.store.ownership import NodeModel
    from tinkex.server.store.records import Occupied, Operation

ENDED = ("dead", "left")
# How long one try to declare a node dead waits for the node's transaction under way. It delays the
# other writes of the node that tries, which tries again later.
_LOCK_TIMEOUT_MS = 500
_LOCK_NOT_AVAILABLE = "55P03"
_ONE = 1
_NODE_COLUMNS = tuple(f.name for f in fields(Node) if f.name != "expired")
_CLAIM_COLUMNS = tuple(f.name for f in fields(Claim))


class OwnershipQueries(StoreState):
    """The part of the store that knows which node owns what."""

    async def join(self, cluster: str, node: Node, lease_s: float) -> Membership:
        database = self._database

        def enter(connection: Connection) -> Membership:
            database.driver.share(connection, lease_s)
            now = self._clock_of(connection)
            return _join(connection, cluster, node, lease_s, now, database.driver.shown)

        membership = await database.write_alone(enter, self._joined)
        await self._listen(node.node_id)
        return membership

    def _joined(self, membership: Membership) -> Membership:
        node = membership.node
        self._member = NodeFence(node.node_id, node.number)
        self._database.fence(self._member.check)
        self._overflow.number_for(node.number)
        # What earlier processes left unfinished belongs to keys, which are adopted one by one.
        self._open.clear()
        self._open_read = True
        return membership

    async def renew(self, lease_s: float, load: NodeLoad) -> float:
        node_id = self._me()

        def renew(connection: Connection) -> float:
            now = self._clock_of(connection)
            query = update(nodes).where(
                nodes.c.node_id == node_id, nodes.c.state.in_(MEMBER_STATES)
            )
            query = query.values(lease_until=now + lease_s, load=load)
            until = connection.execute(query.returning(nodes.c.lease_until)).scalar_one_or_none()
            if until is None:
                raise lease_lost(node_id, None)
            return until - lease_s

        return await self._database.write_lightly(renew)

    async def announce(self, base_models: Sequence[NodeModel]) -> None:
        node_id = self._me()
        query = update(nodes).where(nodes.c.node_id == node_id)
        query = query.values(base_models=tuple(base_models))

        def announce(connection: Connection) -> None:
            connection.execute(query)
            notify(connection, None, f"node {node_id}")

        await self._database.write(announce)

    async def leave(self) -> None:
        node_id = self._me()
        # Nothing is accepted after it.
        await self._behind.flush()

        def leave(connection: Connection) -> None:
            _end(connection, node_id, "left", self._clock_of(connection))
            notify(connection, node_id, f"node {node_id}")

        await self._database.write(leave, lambda _: self._adopted.clear())

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        named = or_(nodes.c.name == name, nodes.c.node_id == name)

        state = "alive" if undo else "draining"

        def drain(connection: Connection) -> bool:
            query = update(nodes).where(named, nodes.c.state.in_(MEMBER_STATES))
            found = connection.execute(query.values(state=state).returning(nodes.c.node_id))
            node_ids = found.scalars().all()
            for node_id in node_ids:
                notify(connection, self._origin, f"node {node_id}")
            return bool(node_ids)

        return await self._database.write(drain)

    async def nodes(self) -> Sequence[Node]:
        def all_of(connection: Connection) -> list[Node]:
            query = _nodes(self._clock_of(connection)).order_by(nodes.c.number)
            return [_node(row) for row in connection.execute(query).mappings()]

        return await self._database.list(all_of)

    async def declare_dead(self, node_id: str) -> bool:
        def declare(connection: Connection) -> bool:
            try:
                with _short_waits(connection):
                    return self._declare(connection, node_id)
            except _BusyError:
                return False

        return await self._database.write_alone(declare)

    def _declare(self, connection: Connection, node_id: str) -> bool:
        row = _locked(connection, node_id, self._clock_of(connection))
        if row is None or row.state in ENDED:
            return True
        if not row.expired:
            return False
        _end(connection, node_id, "dead", self._clock_of(connection))
        notify(connection, self._origin, f"node {node_id}")
        return True

    async def forget_nodes(self, before: float) -> int:
        owns = exists().where(claims.c.node_id == nodes.c.node_id)
        gone = delete(nodes).where(nodes.c.state.in_(ENDED), nodes.c.ended_at < before, ~owns)

        def forget(connection: Connection) -> int:
            numbers = connection.execute(gone.returning(nodes.c.number)).scalars().all()
            for number in numbers:
                forget_node(connection, number)
            return len(numbers)

        return await self._database.write(forget)

    async def claim(self, key: str, node_id: str, *, owner: str, base_model: str) -> Claim:
        values = {"key": key, "node_id": node_id, "owner": owner, "base_model": base_model}

        def add(connection: Connection) -> Claim:
            new = {**values, "epoch": 1, "since": self._clock_of(connection)}
            query = insert(connection, claims).values(new).on_conflict_do_nothing()
            query = query.returning(claims.c.epoch)
            # A claim that was in the way may be released before it is read.
            for _ in range(3):
                if connection.execute(query).one_or_none() is not None:
                    notify(connection, self._origin, f"claim {key} {node_id}")
                kept = _get(connection, key)
                if kept is not None:
                    return kept
            raise StorageError(f"the claim of {key} changes all the time; do it again")

        return await self._database.write(add)

    async def reassign(self, claim: Claim, node_id: str) -> Claim | None:
        takes = exists().where(nodes.c.node_id == node_id, nodes.c.state.in_(MEMBER_STATES))

        def give(connection: Connection) -> Claim | None:
            since = self._clock_of(connection)
            values = {"node_id": node_id, "epoch": claim.epoch + 1, "since": since, "wanted": None}
            query = update(claims).where(_is(claim), self._may_give(claim), takes).values(values)
            if connection.execute(query).rowcount == 0:
                return None
            notify(connection, self._origin, f"claim {claim.key} {node_id}")
            return _get(connection, claim.key)

        def given(kept: Claim | None) -> Claim | None:
            if kept is not None:
                self._disown(claim)
            return kept

        return await self._database.write(give, given)

    async def want(self, key: str, node_id: str | None) -> bool:
        query = update(claims).where(claims.c.key == key).values(wanted=node_id)
        query = query.returning(claims.c.node_id)

        def want(connection: Connection) -> bool:
            owner = connection.execute(query).scalar_one_or_none()
            if owner is not None:
                notify(connection, self._origin, f"claim {key} {owner}")
            return owner is not None

        return await self._database.write(want)

    async def release(self, claim: Claim) -> bool:
        query = delete(claims).where(_is(claim), self._may_give(claim))

        def release(connection: Connection) -> bool:
            return connection.execute(query).rowcount > 0

        def released(found: bool) -> bool:
            if found:
                self._disown(claim)
            return found

        return await self._database.write(release, released)

    async def get_claim(self, key: str) -> Claim | None:
        return await self._database.read(lambda c: _get(c, key))

    async def claims(self, node_ids: Iterable[str] | None = None) -> Sequence[Claim]:
        query = select(*_columns()).order_by(claims.c.since, claims.c.key)
        if node_ids is not None:
            query = query.where(claims.c.node_id.in_(list(node_ids)))
        return await self._database.list(
            lambda c: [_claim(row) for row in c.execute(query).mappings()]
        )

    async def reserve(self, wanted: Reserved, *, max_bytes: int, max_checkpoints: int) -> Occupied:
        values = {**asdict(wanted), "node_id": self._me()}

        def reserve(connection: Connection) -> Occupied:
            self._count_alone(connection, wanted.owner)
            # Before what is kept: a record is stored before its reservation ends.
            reserved = _reserved(connection, wanted.owner)
            found = occupied(all_kept(connection, wanted.owner), reserved, wanted)
            if found.leaves(wanted, max_bytes, max_checkpoints):
                query = insert(connection, reservations).values(values)
                names = [reservations.c.reservation_id]
                connection.execute(query.on_conflict_do_update(index_elements=names, set_=values))
            return found

        return await self._database.write(reserve)

    async def unreserve(self, reservation_id: str) -> None:
        query = delete(reservations).where(reservations.c.reservation_id == reservation_id)
        await self._database.write(lambda connection: connection.execute(query) and None)

    async def adopt(self, claim: Claim) -> None:
        # Another node's claim is found to be none of this one.
        tenure = Tenure(claim.key, self._me(), claim.epoch)
        published = select(samplers.c.sampler_id).where(samplers.c.model_id == claim.key)

        def read(connection: Connection) -> tuple[Sequence[Operation], Sequence[str]]:
            tenure.check(connection)
            return (
                unfinished(connection, claim.key),
                connection.execute(published).scalars().all(),
            )

        await self._database.read(read, partial(self._adopt, claim))

    def _adopt(self, claim: Claim, found: tuple[Sequence[Operation], Sequence[str]]) -> None:
        pending, published = found
        if self._adopted.get(claim.key) == claim.epoch:
            return  # a second call; memory is newer than what was read
        self._forget_key(claim.key, published)
        self._adopted[claim.key] = claim.epoch
        for operation in pending:
            self._open[operation.op_id] = operation

    def give_up(self, claim: Claim) -> Sequence[str]:
        if self._adopted.get(claim.key, claim.epoch) != claim.epoch:
            return []
        self._adopted.pop(claim.key, None)
        return self._forget_key(claim.key)

    def _disown(self, claim: Claim) -> None:
        """Refuse writes under a claim that is over; memory keeps the rest until `give_up`."""
        if self._adopted.get(claim.key) == claim.epoch:
            del self._adopted[claim.key]

    def _forget_key(self, key: str, published: Sequence[str] = ()) -> Sequence[str]:
        ours = {key, *published}
        ours.update(name for name, owner in self._sampler_keys.items() if owner == key)
        for op_id in [o.op_id for o in self._open.values() if o.model_id == key]:
            del self._open[op_id]
        for op_id, operation in self._finished.items():
            if operation.model_id == key:
                self._finished.discard(op_id)
        self._model_cache.discard(key)
        for sampler_id in ours:
            self._sampler_cache.discard(sampler_id)
            self._sampler_keys.pop(sampler_id, None)
        return self._samples.forget_samplers(ours)

    def on_hint(self, hint: Callable[[str], None]) -> None:
        self._hints.append(hint)

    @property
    def _origin(self) -> str | None:
        return None if self._member is None else self._member.node_id

    def _me(self) -> str:
        if self._member is None:
            raise LeaseLostError("this process has not joined a cluster")
        return self._member.node_id

    def _may_give(self, claim: Claim) -> ColumnElement[bool]:
        """Whether this store may end a claim: its own, or one of a node that is not a member."""
        if claim.node_id == self._origin:
            return always()
        return ~exists().where(nodes.c.node_id == claim.node_id, nodes.c.state.in_(MEMBER_STATES))

    def _clock_of(self, connection: Connection) -> ColumnElement[float]:
        return _clock_of(connection, self._behind.clock.wall())


def _clock_of(connection: Connection, wall: float) -> ColumnElement[float]:
    """The time at which the statement runs; `wall`, where the database has no clock."""
    if connection.dialect.name == "postgresql":
        return literal_column("extract(epoch FROM clock_timestamp())::float8", Double())
    return literal(wall, Double())


def living_nodes(connection: Connection, wall: float) -> list[str]:
    """The names of nodes that are alive; the database may be older than nodes are."""
    if not inspect(connection).has_table(nodes.name):
        return []
    now = _clock_of(connection, wall)
    query = select(nodes.c.name).where(nodes.c.state.in_(MEMBER_STATES), nodes.c.lease_until >= now)
    return list(connection.execute(query.order_by(nodes.c.name)).scalars())


def _join(
    connection: Connection,
    name: str,
    node: Node,
    lease_s: float,
    now: ColumnElement[float],
    place: str,
) -> Membership:
    secret = _enter(connection, name, place)
    single = connection.dialect.name == "sqlite"
    others = list(connection.execute(_nodes(now).where(nodes.c.state.in_(MEMBER_STATES))))
    # Whoever holds the file of SQLite is its only node, so an earlier one is not alive.
    gone = [o for o in others if single or (o.expired and o.version != node.version)]
    alive = [o for o in others if not (single or o.expired)]
    strange = next((o for o in alive if o.version != node.version), None)
    if strange is not None:
        raise _refused(
            f"Node {strange.name} of cluster {name!r} has version {strange.version} "
            f"(tinkex {strange.release or 'unknown'}) and this one has {node.version} (tinkex "
            f"{node.release or 'unknown'}). Install the same release everywhere: end all nodes of "
            "the other version first.",
            place,
        )
    for other in gone:
        # It could still renew its lease, and then there would be two versions.
        try:
            with _short_waits(connection):
                _locked(connection, other.node_id, now)
                _end(connection, other.node_id, "dead", now)
        except _BusyError:
            raise StorageError(
                f"Node {other.name} of another version is still writing; end it.", place
            ) from None
    values = {c: getattr(node, c) for c in _NODE_COLUMNS if c not in ("number", "lease_until")}
    values |= {"joined_at": now, "lease_until": now + lease_s, "state": "alive"}
    times = ("number", "joined_at", "lease_until")
    query = nodes.insert().values(values).returning(*(nodes.c[name] for name in times))
    row = connection.execute(query).mappings().one()
    joined = replace(node, **cast("dict[str, Any]", row))
    notify(connection, node.node_id, f"node {node.node_id}")
    return Membership(node=joined, secret=secret, now=joined.joined_at, alone=not alive)


def _enter(connection: Connection, name: str, place: str) -> bytes:
    """The secret of the cluster, which the first node makes; one node joins at a time."""
    new = {"number": _ONE, "name": name, "secret": secrets.token_bytes(32)}
    connection.execute(insert(connection, cluster).values(new).on_conflict_do_nothing())
    columns = select(cluster.c.name, cluster.c.secret)
    row = connection.execute(columns.with_for_update()).one()
    if row.name != name:
        raise _refused(
            f"The database at {place} belongs to the cluster {row.name!r}, and this node was to "
            f"join {name!r}. Join {row.name!r}, or give {name!r} a database of its own.",
            place,
        )
    return row.secret


def _nodes(now: ColumnElement[float]) -> Select[Any]:
    expired = (nodes.c.lease_until < now).label("expired")
    return select(*(nodes.c[name] for name in _NODE_COLUMNS)).add_columns(expired)


def _node(row: RowMapping) -> Node:
    return Node(**cast("dict[str, Any]", row))


def _locked(connection: Connection, node_id: str, now: ColumnElement[float]) -> Any:
    """A node's row, after all its transactions under way; they wait from here on."""
    query = _nodes(now).where(nodes.c.node_id == node_id).with_for_update()
    return connection.execute(query).one_or_none()


def _end(connection: Connection, node_id: str, state: str, now: ColumnElement[float]) -> None:
    query = update(nodes).where(nodes.c.node_id == node_id, nodes.c.state.in_(MEMBER_STATES))
    connection.execute(query.values(state=state, ended_at=now))
    connection.execute(delete(reservations).where(reservations.c.node_id == node_id))


class _BusyError(Exception):
    """A lock was not to be had in time."""


@contextmanager
def _short_waits(connection: Connection) -> Generator[None]:
    """Raise `_BusyError` when a lock is not to be had soon; the transaction continues."""
    if connection.dialect.name != "postgresql":
        yield
        return
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
            yield
            connection.exec_driver_sql("SET LOCAL lock_timeout TO DEFAULT")
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
            raise
        raise _BusyError from error


def _columns() -> list[Any]:
    return [claims.c[name] for name in _CLAIM_COLUMNS]


def _get(connection: Connection, key: str) -> Claim | None:
    query = select(*_columns()).where(claims.c.key == key)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else _claim(row)


def _claim(row: RowMapping) -> Claim:
    return Claim(**cast("dict[str, Any]", row))


def _is(claim: Claim) -> ColumnElement[bool]:
    return and_(
        claims.c.key == claim.key,
        claims.c.node_id == claim.node_id,
        claims.c.epoch == claim.epoch,
    )


def _reserved(connection: Connection, owner: str) -> list[Reserved]:
    """What is reserved for an owner."""
    columns = [reservations.c[field.name] for field in fields(Reserved)]
    query = select(*columns).where(reservations.c.owner == owner)
    rows = connection.execute(query).mappings()
    return [Reserved(**cast("dict[str, Any]", row)) for row in rows]


def _refused(message: str, place: str) -> StorageError:
    error = StorageError(message, place)
    error.retryable = False
    return error
