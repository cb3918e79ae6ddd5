"""Nodes and claims in memory: stores on the same records are the nodes of one cluster."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tinkex.errors import StorageError
from tinkex.server.store.ownership import (
    Claim,
    ClaimLostError,
    LeaseLostError,
    Membership,
    Node,
    NodeLoad,
    claim_key,
)
from tinkex.server.store.records import occupied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.server.store.ownership import NodeModel
    from tinkex.server.store.records import KeptPart, Occupied, Part, Reserved, StoredSampler
    from tinkex.server.store.sample_memory import SampleMemory


@dataclass(slots=True)
class SharedNodes:
    """What all nodes share; owned by the event loop."""

    name: str | None = None
    secret: bytes = b""
    joined: int = 0
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    ended_at: dict[str, float] = field(default_factory=dict[str, float])
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    reservations: dict[str, tuple[str, Reserved]] = field(
        default_factory=dict[str, "tuple[str, Reserved]"]
    )
    """With their nodes."""
    stores: list[MemoryOwnership] = field(default_factory=list["MemoryOwnership"])


class MemoryOwnership:
    """The part of `MemoryStore` that knows which node owns what."""

    def __init__(self, clock: Clock, samples: SampleMemory, shared: SharedNodes) -> None:
        self._clock = clock
        self._samples = samples
        # Mutable state: what nodes share, this node, the epoch of every key it has adopted, and
        # who wants hints.
        self._shared = shared
        self._node_id: str | None = None
        self._adopted: dict[str, int] = {}
        self._hints: list[Callable[[str], None]] = []
        shared.stores.append(self)

    async def join(self, cluster: str, node: Node, lease_s: float) -> Membership:
        shared, now = self._shared, self._clock.wall()
        if shared.name is None:
            shared.name, shared.secret = cluster, secrets.token_bytes(32)
        if shared.name != cluster:
            raise StorageError(
                f"This store belongs to the cluster {shared.name!r}, and this node was to join "
                f"{cluster!r}. Join {shared.name!r}, or give {cluster!r} a store of its own."
            )
        living = [self._seen(n) for n in shared.nodes.values() if n.member]
        alive = [n for n in living if not n.expired]
        if any(n.version != node.version for n in alive):
            raise StorageError(
                f"Nodes of cluster {cluster!r} have another version than {node.version}. Install "
                "the same release everywhere."
            )
        for other in living:
            if other.version != node.version:
                self._end(other.node_id, "dead")
        shared.joined += 1
        joined = replace(node, number=shared.joined, joined_at=now, lease_until=now + lease_s)
        shared.nodes[node.node_id] = replace(joined, state="alive", expired=False)
        self._node_id = node.node_id
        self._hint(f"node {node.node_id}")
        return Membership(node=joined, secret=shared.secret, now=now, alone=not alive)

    async def renew(self, lease_s: float, load: NodeLoad) -> float:
        now = self._clock.wall()
        self._fence()
        me = self._shared.nodes[self._me()]
        self._shared.nodes[me.node_id] = replace(me, lease_until=now + lease_s, load=load)
        return now

    async def announce(self, base_models: Sequence[NodeModel]) -> None:
        self._fence()
        nodes, node_id = self._shared.nodes, self._me()
        nodes[node_id] = replace(nodes[node_id], base_models=tuple(base_models))
        self._hint(f"node {node_id}")

    async def leave(self) -> None:
        self._fence()
        self._end(self._me(), "left")
        self._adopted.clear()

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        self._fence()
        named = [n for n in self._shared.nodes.values() if name in (n.name, n.node_id)]
        found = [n for n in named if n.member]
        for node in found:
            self._shared.nodes[node.node_id] = replace(node, state="alive" if undo else "draining")
            self._hint(f"node {node.node_id}")
        return bool(found)

    async def nodes(self) -> Sequence[Node]:
        return [self._seen(node) for node in self._shared.nodes.values()]

    async def declare_dead(self, node_id: str) -> bool:
        self._fence()
        node = self._shared.nodes.get(node_id)
        if node is None or not node.member:
            return True
        if not self._seen(node).expired:
            return False
        self._end(node_id, "dead")
        return True

    async def forget_nodes(self, before: float) -> int:
        self._fence()
        owning = {claim.node_id for claim in self._shared.claims.values()}
        ended = self._shared.ended_at
        gone = [name for name, at in ended.items() if at < before and name not in owning]
        for node_id in gone:
            del self._shared.nodes[node_id], ended[node_id]
        return len(gone)

    async def claim(self, key: str, node_id: str, *, owner: str, base_model: str) -> Claim:
        self._fence()
        known = self._shared.claims.get(key)
        if known is not None:
            return known
        new = Claim(
            key=key,
            node_id=node_id,
            epoch=1,
            owner=owner,
            base_model=base_model,
            since=self._clock.wall(),
        )
        self._shared.claims[key] = new
        self._hint(f"claim {key} {node_id}")
        return new

    async def reassign(self, claim: Claim, node_id: str) -> Claim | None:
        self._fence()
        target = self._shared.nodes.get(node_id)
        if not self._may_give(claim) or target is None or not target.member:
            return None
        since = self._clock.wall()
        new = replace(claim, node_id=node_id, epoch=claim.epoch + 1, since=since, wanted=None)
        self._shared.claims[claim.key] = new
        self._disown(claim)
        self._hint(f"claim {claim.key} {node_id}")
        return new

    async def want(self, key: str, node_id: str | None) -> bool:
        self._fence()
        known = self._shared.claims.get(key)
        if known is None:
            return False
        self._shared.claims[key] = replace(known, wanted=node_id)
        self._hint(f"claim {key} {known.node_id}")
        return True

    async def release(self, claim: Claim) -> bool:
        self._fence()
        if not self._may_give(claim):
            return False
        del self._shared.claims[claim.key]
        self._disown(claim)
        return True

    async def get_claim(self, key: str) -> Claim | None:
        return self._shared.claims.get(key)

    async def claims(self, node_ids: Iterable[str] | None = None) -> Sequence[Claim]:
        wanted = None if node_ids is None else set(node_ids)
        found = self._shared.claims.values()
        ours = [c for c in found if wanted is None or c.node_id in wanted]
        return sorted(ours, key=lambda c: (c.since, c.key))

    async def reserve(self, wanted: Reserved, *, max_bytes: int, max_checkpoints: int) -> Occupied:
        self._fence()
        held = self._shared.reservations
        reserved = [each for _, each in held.values()]
        found = occupied(await self.kept(wanted.owner), reserved, wanted)
        if found.leaves(wanted, max_bytes, max_checkpoints):
            held[wanted.reservation_id] = (self._me(), wanted)
        return found

    async def unreserve(self, reservation_id: str) -> None:
        self._fence()
        self._shared.reservations.pop(reservation_id, None)

    async def adopt(self, claim: Claim) -> None:
        me = self._me()
        if not self._holds(claim) or claim.node_id != me:
            raise _claim_lost(claim.key, me)
        self._adopted[claim.key] = claim.epoch

    def give_up(self, claim: Claim) -> Sequence[str]:
        if self._adopted.get(claim.key, claim.epoch) != claim.epoch:
            return []
        self._adopted.pop(claim.key, None)
        return self._samples.forget_samplers({claim.key, *self._published(claim.key)})

    def on_hint(self, hint: Callable[[str], None]) -> None:
        self._hints.append(hint)

    # -- for the other parts of the store ---------------------------------------------------------

    async def kept(self, owner: str) -> Mapping[Part, KeptPart]:
        """What is kept for an owner."""
        raise NotImplementedError

    def _published(self, model_id: str) -> Sequence[str]:
        """The samplers of a model."""
        raise NotImplementedError

    def _fence(self) -> None:
        """Raise when this node may not write any more."""
        if self._node_id is None:
            return
        node = self._shared.nodes.get(self._node_id)
        if node is None or not node.member:
            raise LeaseLostError(f"Node {self._node_id} was declared dead, or has left.")

    def _check_key(self, key: str | None) -> None:
        """Raise when this node may not write for a key: it must have adopted it."""
        self._fence()
        if self._node_id is None or key is None:
            return
        claim = self._shared.claims.get(key)
        ours = claim is not None and claim.node_id == self._node_id
        if claim is None or not ours or self._adopted.get(key) != claim.epoch:
            raise _claim_lost(key, self._node_id)

    def _check_sampler(self, sampler: StoredSampler) -> None:
        """Raise when another node owns a sampler's key."""
        self._fence()
        claim = self._shared.claims.get(claim_key(sampler))
        if self._node_id is None or claim is None:
            return
        ours = claim.node_id == self._node_id
        if not ours or self._adopted.get(claim.key, claim.epoch) != claim.epoch:
            raise _claim_lost(claim.key, self._node_id)

    def _hint(self, hint: str) -> None:
        for store in self._shared.stores:
            if store is not self and store._node_id is not None:
                for each in store._hints:
                    each(hint)

    def _me(self) -> str:
        if self._node_id is None:
            raise LeaseLostError("this process has not joined a cluster")
        return self._node_id

    def _seen(self, node: Node) -> Node:
        return replace(node, expired=node.lease_until < self._clock.wall())

    def _end(self, node_id: str, state: str) -> None:
        node = self._shared.nodes[node_id]
        self._shared.nodes[node_id] = replace(node, state="left" if state == "left" else "dead")
        self._shared.ended_at[node_id] = self._clock.wall()
        held = self._shared.reservations
        for name in [name for name, (at, _) in held.items() if at == node_id]:
            del held[name]
        self._hint(f"node {node_id}")

    def _holds(self, claim: Claim) -> bool:
        known = self._shared.claims.get(claim.key)
        return known is not None and (known.node_id, known.epoch) == (claim.node_id, claim.epoch)

    def _may_give(self, claim: Claim) -> bool:
        if not self._holds(claim):
            return False
        owner = self._shared.nodes.get(claim.node_id)
        gone = owner is None or not owner.member
        return gone or claim.node_id == self._node_id

    def _disown(self, claim: Claim) -> None:
        if self._adopted.get(claim.key) == claim.epoch:
            del self._adopted[claim.key]


def _claim_lost(key: str, node_id: str) -> ClaimLostError:
    return ClaimLostError(f"Node {node_id} does not own {key}; another node may.")
