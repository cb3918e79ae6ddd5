"""This process as a node of a cluster: its lease, the keys it owns, and what becomes of others'.

| when                                   | what a node does                                        |
| -------------------------------------- | ------------------------------------------------------- |
| every third of the lease               | renews it, and reads the list of nodes                  |
| a request for a key that nobody owns   | claims it for the node that `place` chooses             |
| a key was given to it                  | takes it over, before it answers a request for it       |
| another node's lease has run out       | declares it dead; the leader gives its keys to others   |
| a key is to move, or the node drains   | hands the key over when what runs for it has ended      |
| it learns that it was declared dead    | ends at once: nothing that it writes is accepted        |

The leader is the first of the nodes that are alive. What it does alone could be done twice without
harm, so it needs no lease of its own.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import anyio

from tinkex.clock import time_limit
from tinkex.errors import TinkerError
from tinkex.server.cluster.figures import ClusterFigures
from tinkex.server.cluster.forwarding import Elsewhere, Forwarder
from tinkex.server.cluster.hop import Hops
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.placement import place, why_not
from tinkex.server.cluster.remote_samples import RemoteSamples
from tinkex.server.store.ownership import LeaseLostError, NodeLoad, NodeModel
from tinkex.server.supervision import keep_running, no_stray_cancellation, quietly

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup

    from tinkex.engine.protocol import Engine
    from tinkex.server.cluster.shared_date import SharedDate
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.store.ownership import Claim, Membership, Node
    from tinkex.server.store.protocol import Store


# How often a lease is renewed before it would run out.
_RENEWALS: Final = 3
# So many keys are taken over, or handed over, at a time.
_AT_ONCE: Final = 8
# Tries to find out who owns a key while it changes.
_LOOKS: Final = 5
# How long a request waits for a key that is being handed over, or for the first list of nodes.
_PATIENCE_S: Final = 20.0
_LIVING: Final = ("alive", "draining")
# How often a node looks whether others have ended sessions without its hearing of that.
_SESSIONS_S: Final = 60.0
# Nodes that have ended are shown for so long.
_REMEMBERED_S: Final = 24 * 3600.0

_log = logging.getLogger(__name__)


class NoNodeError(TinkerError):
    """No node can take a key now."""

    code = "no_node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A membership that was just begun, and what a node is told about it.

    `on_lost` is called with a reason when this node was declared dead; it ends the process.
    """

    membership: Membership
    lease_s: float
    on_lost: Callable[[str], None]
    capacity_bytes: int = 0
    ssl_context: ssl.SSLContext | None = None


class Member:
    """One node. Used from one event loop; its tasks run in the group that it is started in."""

    def __init__(
        self,
        store: Store,
        joined: Joined,
        clock: SharedDate,
        *,
        long_poll_s: float,
    ) -> None:
        membership = joined.membership
        self._store = store
        self._clock = clock
        self._settings = joined
        self._on_lost = joined.on_lost
        self.node_id = membership.node.node_id
        self.hops = Hops(membership.secret, self.node_id, clock.wall)
        self.peers = Peers(clock, long_poll_s=long_poll_s, ssl_context=joined.ssl_context)
        self.forwarder = Forwarder(self.peers, self.hops)
        self.samples = RemoteSamples(self, clock)
        self.figures = ClusterFigures(self)
        self._worker: Worker | None = None
        # Mutable state: the keys that are taken over, and those that are being taken over or handed
        # over, with an event for the end of that; the nodes as they were read last; since when the
        # database has answered without a break; whether it leaves; what wakes the loop, and what
        # it was told; and when to look for sessions that others have ended, because hints may be
        # lost.
        self.owned: dict[str, Claim] = {}
        self._changing: dict[str, anyio.Event] = {}
        self.nodes: dict[str, Node] = {membership.node.node_id: membership.node}
        self._in_touch_since: float | None = None
        self._renewed_at = clock.now()
        self._leaves = False
        self._look_at_sessions_at = clock.now() + _SESSIONS_S
        self._changed = anyio.Event()
        self._ended_sessions: set[str] = set()
        self._changed_keys: set[str] = set()
        self._look_again = False
        self._all_claimed = False
        self._known = anyio.Event()
        self._group: TaskGroup | None = None
        self._slots = anyio.Semaphore(_AT_ONCE)
        store.on_hint(self._hinted)

    # -- what handlers ask ----------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """This node, as the database has it."""
        return self.nodes[self.node_id]

    @property
    def lease_age_s(self) -> float:
        """How long ago the lease was renewed."""
        return self._clock.now() - self._renewed_at

    @property
    def samples_running(self) -> int:
        """The samples of this node's samplers that have started, here or elsewhere."""
        return 0 if self._worker is None else self._worker.samples_running

    @property
    def leads(self) -> bool:
        """Whether this node does what one node has to do."""
        able = [n.number for n in self.nodes.values() if n.role == "full" and _is_alive(n)]
        return self.node.role == "full" and self.node.number <= min(able, default=0)

    @property
    def base_models(self) -> dict[str, NodeModel]:
        """The base models of all nodes, by name."""
        return {
            model.name: model
            for node in self.nodes.values()
            if _is_alive(node)
            for model in node.base_models
        }

    @property
    def serving(self) -> dict[str, list[str]]:
        """The names of the nodes that serve each base model."""
        found: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for model in node.base_models if _is_alive(node) else ():
                found.setdefault(model.name, []).append(node.name)
        return found

    def at_engine(self, base_model: str | None = None) -> None:
        """Raise `Elsewhere` unless this node can compute with a base model, or with any."""
        able = [
            node
            for node in self.nodes.values()
            if node.role == "full"
            and node.serving
            and (base_model is None or any(m.name == base_model for m in node.base_models))
        ]
        if not able:
            raise NoNodeError(why_not(list(self.nodes.values()), base_model or ""))
        if all(node.node_id != self.node_id for node in able):
            target = min(able, key=lambda node: node.load.samples_running)
            raise Elsewhere(target, base_model or "an engine")

    async def own(self, key: str, *, owner: str, base_model: str, here: bool = False) -> None:
        """Return when this node owns a key and has taken it over; raises `Elsewhere` otherwise.

        A key that is new goes to the node that `place` chooses, or stays `here` if it can.
        """
        if key in self.owned and key not in self._changing:
            return
        await self._wait_for(self._known)
        for _ in range(_LOOKS):
            changing = self._changing.get(key)
            if changing is not None:
                await self._wait_for(changing)
            elif key in self.owned:
                return
            else:
                claim = await self._claim(key, owner, base_model, here=here)
                if claim.node_id == self.node_id:
                    await self._take_over(claim)
                elif await self._is_owner(claim.node_id):
                    raise Elsewhere(self.nodes[claim.node_id], key)
        raise NoNodeError(f"the owner of {key} changes; send the request again")

    async def at_owner(self, key: str) -> None:
        """Like `own`, for a key that need not be owned: nothing is claimed."""
        if key in self.owned and key not in self._changing:
            return
        claim = await self._store.get_claim(key)
        if claim is not None:
            await self.own(key, owner=claim.owner, base_model=claim.base_model)

    async def owner(self, key: str) -> Node | None:
        """The node that owns a key now, if one does."""
        claim = await self._store.get_claim(key)
        if claim is None or not await self._is_owner(claim.node_id):
            return None
        return self.nodes[claim.node_id]

    async def _wait_for(self, event: anyio.Event) -> None:
        async with time_limit(self._clock, _PATIENCE_S) as limit:
            await event.wait()
        if limit.expired:
            raise NoNodeError("the owner of this is changing; send the request again")

    async def _claim(self, key: str, owner: str, base_model: str, *, here: bool) -> Claim:
        claim = await self._store.get_claim(key)
        if claim is not None:
            return claim
        serves = any(model.name == base_model for model in self.node.base_models)
        if here and serves and self.node.serving:
            node: Node | None = self.node
        else:
            node = place(list(self.nodes.values()), base_model, owner, key=key)
        if node is None:
            raise NoNodeError(why_not(list(self.nodes.values()), base_model))
        claim = await self._store.claim(key, node.node_id, owner=owner, base_model=base_model)
        if claim.node_id == node.node_id:
            # Until the node reports it, so that of a burst of new keys each has its share.
            self.nodes[node.node_id] = _with_one_more(node, claim)
        return claim

    async def _is_owner(self, node_id: str) -> bool:
        """Whether a node may own something; if it is dead, its keys are given to others."""
        node = self.nodes.get(node_id)
        if node is None or not _is_alive(node):
            await self._look_at_nodes()
            node = self.nodes.get(node_id)
        if node is None or node.state in ("dead", "left"):
            await self._give_away([node_id])
            return False
        # Of one that is silent, the lease has to run out first.
        return True

    # -- the life of a node ---------------------------------------------------------------------

    def start(self, worker: Worker, engine: Engine, group: TaskGroup) -> None:
        """Be a node from now on, and take work as soon as the engine is ready."""
        self._worker, self._group = worker, group
        group.start_soon(self._renew)
        if self.node.role == "full":
            group.start_soon(
                keep_running, "announcing the engine", self._announce(engine), self._clock
            )
        group.start_soon(keep_running, "looking after the cluster", self._watch, self._clock)

    def _announce(self, engine: Engine) -> Callable[[], Awaitable[None]]:
        async def announce() -> None:
            wait_ready: Callable[[], Awaitable[object]] | None
            wait_ready = getattr(engine, "wait_ready", None)
            if wait_ready is not None:
                await wait_ready()
            served = [
                NodeModel(
                    name=spec.name,
                    max_context_length=spec.max_context_length,
                    vocab_size=spec.vocab_size,
                    tokenizer_id=spec.tokenizer_id,
                    arch=spec.arch,
                )
                for spec in engine.models
            ]
            if self._settings.membership.alone:
                # Clients could not send heartbeats while there was no node.
                await self._store.touch_sessions(self._clock.wall())
            await self._store.announce(served)
            self._look_soon()
            await anyio.sleep_forever()

        return announce

    async def stop(self) -> None:
        """Hand everything over, if other nodes can take it."""
        await quietly(self._store.drain(self.node_id), "draining")
        await quietly(self._look_at_nodes(), "reading the list of nodes")
        async with anyio.create_task_group() as group:
            for key in list(self.owned):
                group.start_soon(self._move_off, key)

    async def leave(self) -> None:
        """End the membership: nothing that this node writes is accepted from here on."""
        self._leaves = True
        await quietly(self._store.leave(), "leaving the cluster")

    async def _renew(self) -> None:
        """Renew the lease until cancelled; end the process when it is lost."""
        while True:
            try:
                with no_stray_cancellation():
                    before = self._clock.now()
                    now = await self._store.renew(self._settings.lease_s, self._load())
                    self._clock.follow(now, before)
            except LeaseLostError as lost:
                self._lost(str(lost))
                return
            except Exception as error:  # noqa: BLE001 - tried again, as long as it takes
                self._in_touch_since = None
                _log.error("the lease of this node cannot be renewed yet: %s", error)
            else:
                if not self._is_in_touch():
                    self._in_touch_since = None
                self._renewed_at = self._clock.now()
                if self._in_touch_since is None:
                    self._in_touch_since = self._renewed_at
            await self._clock.sleep(self._settings.lease_s / _RENEWALS)

    def _is_in_touch(self) -> bool:
        """Whether the lease was renewed lately.

        The database may be out of reach although nothing has failed: calls wait for it a while.
        """
        return self._clock.now() - self._renewed_at < self._settings.lease_s

    def _load(self) -> NodeLoad:
        worker = self._worker
        if worker is None:
            return NodeLoad(capacity_bytes=self._settings.capacity_bytes)
        tenants: dict[str, int] = {}
        for claim in self.owned.values():
            tenants[claim.owner] = tenants.get(claim.owner, 0) + 1
        return NodeLoad(
            models=len(self.owned),
            queued_ops=sum(worker.queue_lengths().values()),
            # Those that other nodes compute are their load.
            samples_running=worker.samples_in_flight - self.samples.running,
            tenants=tenants,
            capacity_bytes=self._settings.capacity_bytes,
        )

    async def _watch(self) -> None:
        """Take over, hand over and clean up, when something has changed or a while has passed."""
        worker = self._worker
        assert worker is not None
        await worker.started.wait()
        every_s = self._settings.lease_s / _RENEWALS
        look_at = 0.0
        while True:
            self._changed = anyio.Event()
            sessions, self._ended_sessions = self._ended_sessions, set()
            for session_id in sessions:
                await quietly(worker.session_ended(session_id), "a session's end")
            keys, self._changed_keys = self._changed_keys, set()
            for key in keys:
                await quietly(self._look_at(key), f"looking at {key}")
            if self._look_again or self._clock.now() >= look_at:
                self._look_again = False
                look_at = self._clock.now() + every_s
                await quietly(self._reconcile(), "looking after the cluster")
            async with time_limit(self._clock, max(look_at - self._clock.now(), 0.0)):
                await self._changed.wait()

    def _hinted(self, hint: str) -> None:
        # Only noted: this is called by the event loop, outside of any task.
        what, _, name = hint.partition(" ")
        if what == "session":
            self._ended_sessions.add(name)
        elif what == "claim":
            self._changed_keys.add(name)
        elif what in ("node", "all"):
            self._look_again = True
            if what == "all":
                self._look_at_sessions_at = self._clock.now()
        else:
            return
        self._changed.set()

    def _look_soon(self) -> None:
        self._look_again = True
        self._changed.set()

    async def _look_at(self, key: str) -> None:
        claim = await self._store.get_claim(key)
        if claim is not None and claim.node_id == self.node_id:
            self._attend(claim)

    async def _reconcile(self) -> None:
        await self._look_at_nodes()
        self._known.set()
        await self._bury()
        if self.leads:
            ended = [n.node_id for n in self.nodes.values() if n.state in ("dead", "left")]
            await self._give_away(ended)
            if not self._all_claimed:
                await self._claim_open_models()
                self._all_claimed = True
            await self._store.forget_nodes(self._clock.wall() - _REMEMBERED_S)
        for claim in await self._store.claims([self.node_id]):
            self._attend(claim)
        await self._end_sessions()
        await self._release_ended()

    async def _end_sessions(self) -> None:
        """Free what sessions held here that other nodes have ended."""
        worker = self._worker
        if worker is None:
            return
        if self._clock.now() >= self._look_at_sessions_at:
            self._look_at_sessions_at = self._clock.now() + _SESSIONS_S
            for key in list(self.owned):
                session_id = await self._session_of(key)
                if session_id is not None and not await self._is_active(session_id):
                    self._ended_sessions.add(session_id)
        while self._ended_sessions:
            await worker.session_ended(self._ended_sessions.pop())

    async def _session_of(self, key: str) -> str | None:
        record = await self._store.get_model(key) or await self._store.get_sampler(key)
        return None if record is None else record.session_id

    async def _is_active(self, session_id: str) -> bool:
        session = await self._store.get_session(session_id)
        return session is not None and session.active

    async def _look_at_nodes(self) -> None:
        self.nodes = {node.node_id: node for node in await self._store.nodes()}
        # Requests that wait for a frozen node get an answer when it is declared dead.
        self.peers.retain({node.node_id for node in self.nodes.values() if _is_member(node)})
        node = self.nodes.get(self.node_id)
        if node is None or not _is_member(node):
            self._lost("another node declared this one dead, because its lease had run out")
            raise LeaseLostError("this node was declared dead", "")

    def _lost(self, reason: str) -> None:
        if not self._leaves:
            self._on_lost(reason)

    async def _bury(self) -> None:
        """Declare nodes dead whose leases have run out.

        Not while this node has only just reached the database again: the others may not have yet.
        """
        since, lease_s = self._in_touch_since, self._settings.lease_s
        if since is None or not self._is_in_touch() or self._clock.now() - since < lease_s:
            return
        silent = [n for n in self.nodes.values() if n.silent]
        for node in silent:
            if node.node_id != self.node_id and await self._store.declare_dead(node.node_id):
                _log.warning("node %s (%s) was declared dead", node.name, node.url)
                self.nodes[node.node_id] = replace(node, state="dead")
                self.peers.drop(node.node_id)

    async def _give_away(self, node_ids: Sequence[str]) -> None:
        """Give the keys of nodes that have ended to others."""
        nodes = list(self.nodes.values())
        for claim in await self._store.claims(node_ids) if node_ids else ():
            target = place(nodes, claim.base_model, claim.owner, key=claim.key)
            if target is None:
                _log.error("no node takes over %s: %s", claim.key, why_not(nodes, claim.base_model))
                continue
            await self._store.reassign(claim, target.node_id)
            nodes = [_with_one_more(n, claim) if n is target else n for n in nodes]

    async def _claim_open_models(self) -> None:
        """Claim open models that a server without a cluster has left in this database."""
        claimed = {claim.key for claim in await self._store.claims()}
        for model in await self._store.open_models():
            if model.model_id not in claimed:
                target = place(
                    list(self.nodes.values()), model.base_model, model.owner, key=model.model_id
                )
                if target is not None:
                    await self._store.claim(
                        model.model_id,
                        target.node_id,
                        owner=model.owner,
                        base_model=model.base_model,
                    )

    # -- keys -----------------------------------------------------------------------------------

    def _attend(self, claim: Claim) -> None:
        """Start what a claim of this node needs."""
        if self._group is None or claim.key in self._changing:
            return
        if claim.key not in self.owned:
            self._group.start_soon(self._quietly_take_over, claim)
        elif claim.wanted is not None or self.node.state == "draining":
            self._group.start_soon(self._move_off, claim.key)

    async def _quietly_take_over(self, claim: Claim) -> None:
        async with self._slots:
            await quietly(self._take_over(claim), f"taking over {claim.key}")

    async def _take_over(self, claim: Claim) -> None:
        """Read what there is of a key; others wait for the end of that."""
        if self._worker is None:
            return
        await self._worker.started.wait()
        # Nothing is awaited between this and the note of the change: one task makes it.
        if claim.key in self._changing or claim.key in self.owned:
            return
        async with self._change(claim.key):
            await self._store.adopt(claim)
            self.owned[claim.key] = claim
            try:
                await self._worker.handover.take_over(claim)
                self.figures.taken_over += 1
            except BaseException:
                del self.owned[claim.key]
                self._store.give_up(claim)
                raise

    async def _move_off(self, key: str) -> None:
        async with self._slots:
            await quietly(self._hand_over(key), f"handing over {key}")

    async def _hand_over(self, key: str) -> None:
        """Hand a key to the node that is wanted for it, or to any other if this one drains."""
        worker = self._worker
        if worker is None or key in self._changing or key not in self.owned:
            return
        claim = await self._store.get_claim(key)
        if claim is None or claim.node_id != self.node_id:
            return
        target = self._target(claim)
        # Again, because it may have changed during the await above.
        if target is None or key in self._changing or key not in self.owned:
            return
        async with self._change(key):
            owned = self.owned[key]
            await worker.handover.hand_over(key, lambda: self.owned.pop(key, None))
            worker.handover.wake(self._store.give_up(owned))
            try:
                moved = await self._store.reassign(owned, target.node_id)
            except Exception:  # noqa: BLE001 - it is taken over again
                _log.exception("%s could not be given to %s", key, target.name)
                moved = None
            if moved is None:
                self._look_soon()  # taken over again, if it is still this node's
            else:
                self.figures.handed_over += 1
                _log.info("%s moved to node %s", key, target.name)

    def _target(self, claim: Claim) -> Node | None:
        wanted = self.nodes.get(claim.wanted or "")
        if wanted is not None and wanted.serving and wanted.node_id != self.node_id:
            return wanted
        if self.node.state != "draining":
            return None
        others = [node for node in self.nodes.values() if node.node_id != self.node_id]
        return place(others, claim.base_model, claim.owner, key=claim.key)

    async def _release_ended(self) -> None:
        """Forget the claims of keys of ended sessions that nothing is left of."""
        worker = self._worker
        if worker is None:
            return
        held = worker.handover.held_keys()
        for key, claim in list(self.owned.items()):
            if key in held or not await self._is_over(key, claim) or key in self._changing:
                continue
            async with self._change(key):
                still_held = key in worker.handover.held_keys()
                if not still_held and await self._store.release(claim):
                    del self.owned[key]
                    self._store.give_up(claim)

    async def _is_over(self, key: str, claim: Claim) -> bool:
        # A key begins with its session, which is in memory: of most keys nothing else is read.
        if await self._is_active(key.rsplit(":", 2)[0]):
            return False
        model = await self._store.get_model(key)
        if model is not None and not model.closed:
            return False
        sampler = await self._store.get_sampler(key) if model is None else None
        record = model or sampler
        if record is None:
            # Claimed for a request that was refused, or is still on its way.
            return self._clock.wall() - claim.since > 2 * self._settings.lease_s
        return not await self._is_active(record.session_id)

    @asynccontextmanager
    async def _change(self, key: str) -> AsyncGenerator[None]:
        ended = self._changing[key] = anyio.Event()
        try:
            yield
        finally:
            del self._changing[key]
            ended.set()


def _is_member(node: Node) -> bool:
    return node.state in _LIVING


def _is_alive(node: Node) -> bool:
    return _is_member(node) and not node.expired


def _with_one_more(node: Node, claim: Claim) -> Node:
    """A node with one more key, so that the next one is placed with it in mind."""
    tenants = {**node.load.tenants, claim.owner: node.load.tenants.get(claim.owner, 0) + 1}
    return replace(node, load=replace(node.load, models=node.load.models + 1, tenants=tenants))
