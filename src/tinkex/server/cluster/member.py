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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from tinkex.clock import time_limit
from tinkex.server.cluster.figures import ClusterFigures
from tinkex.server.cluster.forwarding import Elsewhere, Forwarder
from tinkex.server.cluster.hop import Hops
from tinkex.server.cluster.keys import OwnedKeys
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.placement import moves, why_not
from tinkex.server.cluster.remote_samples import RemoteSamples
from tinkex.server.cluster.roster import NoNodeError, Roster
from tinkex.server.store.ownership import LeaseLostError, NodeLoad, NodeModel
from tinkex.server.supervision import keep_running, no_stray_cancellation, quietly

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine
    from tinkex.server.cluster.shared_date import SharedDate
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.store.ownership import Claim, Membership, Node
    from tinkex.server.store.protocol import Store


# How often a lease is renewed before it would run out.
_RENEWALS: Final = 3
# How long a request is held for a key that is being handed over, for a node that can take it, or
# for the first list of nodes; and the pauses between two looks. Official clients send a request
# again ten times.
_PATIENCE_S: Final = 20.0
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
# How often a node looks whether others have ended sessions without its hearing of that.
_SESSIONS_S: Final = 60.0
# Nodes that have ended are shown, and their base models known, for so long.
_REMEMBERED_S: Final = 24 * 3600.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A membership that was just begun, and what a node is told about it.

    `on_lost` is called with a reason when this node was declared dead; it ends the process.
    `rebalance_s` is how often the leader looks whether a key should move; 0 is never.
    """

    membership: Membership
    lease_s: float
    on_lost: Callable[[str], None]
    rebalance_s: float = 0.0
    ssl_context: ssl.SSLContext | None = None


class Hold:
    """A request that is held for a while, because what it needs may come."""

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock = clock
        self._ends = clock.now() + patience_s
        self._pause_s = _FIRST_PAUSE_S

    async def again(self) -> bool:
        """Pause, each time longer; False when it was held long enough."""
        if self._clock.now() >= self._ends:
            return False
        await self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


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
        self.roster = Roster(membership.node)
        self.keys = OwnedKeys(
            store, self.roster, clock, lease_s=joined.lease_s, look_soon=self._look_soon
        )
        self.hops = Hops(membership.secret, self.node_id, clock.wall)
        self.peers = Peers(clock, long_poll_s=long_poll_s, ssl_context=joined.ssl_context)
        self.forwarder = Forwarder(self.peers, self.hops)
        self.samples = RemoteSamples(self, clock)
        self.figures = ClusterFigures(self)
        self._worker: Worker | None = None
        # Mutable state: since when the database has answered without a break; whether this node
        # leaves; what wakes the loop, and what it was told; the bytes of adapters on the device,
        # and how many there may be; keys of ended nodes that no node can take over; when to look
        # for sessions that others have ended, because hints may be lost; and when to look whether
        # the nodes are out of balance.
        self._in_touch_since: float | None = None
        self._renewed_at = clock.now()
        self._leaves = False
        self._changed = anyio.Event()
        self._ended_sessions: set[str] = set()
        self._changed_keys: set[str] = set()
        self._look_again = False
        self._all_claimed = False
        self._known = anyio.Event()
        self._adapter_bytes = (0, 0)
        self._orphans: set[str] = set()
        self._look_at_sessions_at = clock.now() + _SESSIONS_S
        self._balance_at = clock.now() + joined.rebalance_s
        store.on_hint(self._hinted)

    # -- what handlers ask ----------------------------------------------------------------------

    @property
    def lease_age_s(self) -> float:
        """How long ago the lease was renewed."""
        return self._clock.now() - self._renewed_at

    @property
    def samples_running(self) -> int:
        """The samples of this node's samplers that have started, here or elsewhere."""
        return 0 if self._worker is None else self._worker.samples_running

    async def own(self, key: str, *, owner: str, base_model: str, here: bool = False) -> None:
        """Return when this node owns a key and has taken it over; raises `Elsewhere` otherwise.

        A key that is new goes to the node that `place` chooses, or stays `here` if it can.
        """
        if self.keys.has(key):
            return
        await self._wait_for(self._known)
        hold = self.hold()
        while True:
            changing = self.keys.change_of(key)
            if changing is not None:
                await self._wait_for(changing)
            if self.keys.has(key):
                return
            claim = await self._store.get_claim(key)
            if claim is None:
                node = await self.when(
                    lambda: self.roster.place_new(key, owner, base_model, here=here)
                )
                claim = await self._claim(key, node, owner, base_model)
            if claim.node_id == self.node_id:
                await self.keys.take_over(claim)
                if self.keys.has(key):
                    return
            elif await self._is_owner(claim.node_id):
                raise Elsewhere(self.roster.nodes[claim.node_id], key)
            if not await hold.again():
                raise NoNodeError(f"no node has taken over {key} yet; send the request again")

    async def at_owner(self, key: str) -> None:
        """Like `own`, for a key that need not be owned: nothing is claimed."""
        if self.keys.has(key):
            return
        claim = await self._store.get_claim(key)
        if claim is not None:
            await self.own(key, owner=claim.owner, base_model=claim.base_model)

    async def owners_of_session(self, session_id: str) -> list[Node]:
        """The other nodes that own something of a session."""
        ids = {
            claim.node_id
            for claim in await self._store.claims()
            if claim.key.startswith(f"{session_id}:") and claim.node_id != self.node_id
        }
        return [node for name, node in self.roster.members.items() if name in ids]

    async def next_owner(self, key: str, last: Node, *, unreachable: bool) -> Node | None:
        """The other node that owns a key after the last one; the request is held until it does.

        None if none does in time, or this node does, or the key is over; or if the last one is
        alive and only cannot be reached from here.
        """
        hold = self.hold()
        # Later than it can have renewed its lease before it was asked.
        alive_until = last.lease_until + self._settings.lease_s / 2
        while True:
            seen = self.roster.nodes.get(last.node_id, last)
            if unreachable and seen.lease_until > alive_until:
                return None
            claim = await self._store.get_claim(key)
            if claim is None or claim.node_id == self.node_id:
                return None
            if await self._is_owner(claim.node_id) and claim.node_id != last.node_id:
                return self.roster.nodes[claim.node_id]
            if not await hold.again():
                return None

    async def _wait_for(self, event: anyio.Event) -> None:
        async with time_limit(self._clock, _PATIENCE_S) as limit:
            await event.wait()
        if limit.expired:
            raise NoNodeError("the owner of this is changing; send the request again")

    async def when(self, look: Callable[[], T]) -> T:
        """What a look at the nodes gives, as soon as one can do it: nodes are started again."""
        hold = self.hold()
        while True:
            try:
                return look()
            except NoNodeError:
                if not await hold.again():
                    raise

    def hold(self) -> Hold:
        """Holds a request that no node can answer now."""
        return Hold(self._clock, _PATIENCE_S)

    async def _claim(self, key: str, node: Node, owner: str, base_model: str) -> Claim:
        claim = await self._store.claim(key, node.node_id, owner=owner, base_model=base_model)
        if claim.node_id == node.node_id:
            self.roster.expect(claim)
        return claim

    async def _is_owner(self, node_id: str) -> bool:
        """Whether a node may own something; if it is dead, its keys are given to others."""
        if not self.roster.has(node_id):
            await self._look_at_nodes()
        if node_id not in self.roster.members:
            await self._give_away([node_id])
            return False
        # Of one that is silent, the lease has to run out first.
        return True

    # -- the life of a node ---------------------------------------------------------------------

    def start(self, worker: Worker, engine: Engine, group: TaskGroup) -> None:
        """Be a node from now on, and take work as soon as the engine is ready."""
        self._worker = worker
        self.keys.start(worker, group)
        group.start_soon(self._renew)
        if self.roster.node.role == "full":
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
            while True:
                # Not with the renewal: an engine that hangs must not cost the lease.
                await quietly(self._read_figures(engine), "reading the engine's figures")
                await self._clock.sleep(self._settings.lease_s / _RENEWALS)

        return announce

    async def _read_figures(self, engine: Engine) -> None:
        stats = await engine.stats()
        self._adapter_bytes = (
            int(stats.get("adapters_resident_bytes", 0)),
            int(stats.get("adapters_capacity_bytes", 0)),
        )

    async def stop(self) -> None:
        """Hand everything over, if other nodes can take it."""
        await quietly(self._store.drain(self.node_id), "draining")
        await quietly(self._look_at_nodes(), "reading the list of nodes")
        await self.keys.hand_over_all()

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
            return NodeLoad()
        tenants: dict[str, int] = {}
        for claim in self.keys.owned.values():
            tenants[claim.owner] = tenants.get(claim.owner, 0) + 1
        resident_bytes, capacity_bytes = self._adapter_bytes
        return NodeLoad(
            models=len(self.keys.owned),
            resident_bytes=resident_bytes,
            capacity_bytes=capacity_bytes,
            queued_ops=sum(worker.queue_lengths().values()),
            # Those that other nodes compute are their load.
            samples_running=worker.samples_in_flight - self.samples.running,
            tenants=tenants,
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
            keys, self._changed_keys = self._changed_keys, set()
            for key in keys:
                await quietly(self._look_at(key), f"looking at {key}")
            if self._look_again or self._clock.now() >= look_at:
                self._look_again = False
                look_at = self._clock.now() + every_s
                await quietly(self._reconcile(), "looking after the cluster")
            sessions, self._ended_sessions = self._ended_sessions, set()
            for session_id in sessions:
                await quietly(worker.session_ended(session_id), "a session's end")
            async with time_limit(self._clock, max(look_at - self._clock.now(), 0.0)):
                await self._changed.wait()

    def _hinted(self, hint: str) -> None:
        # Only noted: this is called by the event loop, outside of any task.
        what, _, name = hint.partition(" ")
        if what == "session":
            self._ended_sessions.add(name)
        elif what == "claim":
            key, _, node_id = name.partition(" ")
            if node_id != self.node_id:
                return
            self._changed_keys.add(key)
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
            self.keys.attend(claim)

    async def _reconcile(self) -> None:
        await self._look_at_nodes()
        self._known.set()
        await self._declare_dead()
        if self.roster.leads:
            await self._lead()
        for claim in await self._store.claims([self.node_id]):
            self.keys.attend(claim)
        if self._clock.now() >= self._look_at_sessions_at:
            self._look_at_sessions_at = self._clock.now() + _SESSIONS_S
            self._ended_sessions |= await self.keys.ended_sessions()
        await self.keys.release_ended()

    async def _lead(self) -> None:
        """Do what one node has to do."""
        await self._give_away(self.roster.ended)
        if not self._all_claimed:
            await self._claim_open_models()
            self._all_claimed = True
        await self._store.forget_nodes(self._clock.wall() - _REMEMBERED_S)
        every_s = self._settings.rebalance_s
        if every_s and self._clock.now() >= self._balance_at:
            self._balance_at = self._clock.now() + every_s
            await self._balance()

    async def _balance(self) -> None:
        """Have one key moved from a node with many to one with few."""
        claims = await self._store.claims()
        nodes = self.roster.nodes
        if any(claim.wanted in nodes and nodes[claim.wanted].serving for claim in claims):
            return  # one at a time
        for move in moves(nodes.values(), claims, most=1):
            _log.info("%s is to go to node %s", move.claim.key, move.target.name)
            await self._store.want(move.claim.key, move.target.node_id)

    async def _look_at_nodes(self) -> None:
        self.roster.update(await self._store.nodes())
        # Requests that wait for a frozen node get an answer when it is declared dead.
        members = self.roster.members
        self.peers.retain(set(members))
        if self.node_id not in members:
            self._lost("another node declared this one dead, because its lease had run out")
            raise LeaseLostError("this node was declared dead", "")

    def _lost(self, reason: str) -> None:
        if not self._leaves:
            self._on_lost(reason)

    async def _declare_dead(self) -> None:
        """Declare nodes dead whose leases have run out.

        Not while this node has only just reached the database again: the others may not have yet.
        """
        since, lease_s = self._in_touch_since, self._settings.lease_s
        if since is None or not self._is_in_touch() or self._clock.now() - since < lease_s:
            return
        for node in [node for node in self.roster.nodes.values() if node.silent]:
            if node.node_id != self.node_id and await self._store.declare_dead(node.node_id):
                _log.warning("node %s (%s) was declared dead", node.name, node.url)
                self.roster.mark_dead(node)
                self.peers.drop(node.node_id)

    async def _give_away(self, node_ids: Sequence[str]) -> None:
        """Give the keys of nodes that have ended to others."""
        for claim in await self._store.claims(node_ids) if node_ids else ():
            target = self.roster.place_orphan(claim)
            if target is None:
                if claim.key not in self._orphans:
                    self._orphans.add(claim.key)
                    why = why_not(self.roster.nodes.values(), claim.base_model)
                    _log.error("no node takes over %s: %s", claim.key, why)
                continue
            self._orphans.discard(claim.key)
            moved = await self._store.reassign(claim, target.node_id)
            if moved is not None:
                self.roster.expect(moved)

    async def _claim_open_models(self) -> None:
        """Claim open models that a server without a cluster has left in this database."""
        claimed = {claim.key for claim in await self._store.claims()}
        for model in await self._store.open_models():
            if model.model_id not in claimed:
                try:
                    node = self.roster.place_new(model.model_id, model.owner, model.base_model)
                    await self._claim(model.model_id, node, model.owner, model.base_model)
                except NoNodeError as error:
                    _log.error("no node takes over %s: %s", model.model_id, error)
