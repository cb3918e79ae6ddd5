"""Which node gets a new key, which keys move between nodes, and which node computes a sample.

Pure functions of what the store says about nodes and claims: no I/O, no clock, no state. The same
arguments give the same answer on every node, whatever the order of the nodes.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from tinkex.server.store.ownership import Claim, Node, NodeLoad

# Memory is compared in eighths: nodes that differ by less are compared by their models.
_EIGHTHS = 8
# A key moves when its node has more keys than the other one by this share of them.
_SLACK_SHARE = 5
# Weight of a sampler's owner in rendezvous hashing: it needs no hop and no transfer.
_OWNER_WEIGHT = 1.25
# Tokens of a prompt that decide where it is computed.
_PREFIX_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A key that is to go from one node to another."""

    claim: Claim
    source: Node
    target: Node
    reason: Literal["drain", "balance"]


def can_take(node: Node, base_model: str | None) -> bool:
    """Whether a node may be given a key of this base model, or of any."""
    able = node.role == "full" and node.serving
    return able and (base_model is None or _serves(node, base_model))


def place(
    nodes: Iterable[Node],
    base_model: str,
    owner: str,
    *,
    key: str = "",
    avoid: Collection[str] = (),
) -> Node | None:
    """The node for a new key of the tenant `owner`; None when no node can take it.

    Most free memory is first, in eighths of what a node has; then fewest models, where the models
    of this tenant count twice, so that they are spread; then the shortest queue. `key` decides
    between equals, so that a burst of new keys does not go to one node. `avoid` has ids of nodes.
    """
    fit = [node for node in nodes if can_take(node, base_model) and node.node_id not in avoid]
    seed = _seed(owner, key)
    return min(fit, key=lambda node: _rank(node, owner, seed), default=None)


def why_not(nodes: Iterable[Node], base_model: str) -> str:
    """Why no node can take a key of this base model."""
    members = [node for node in nodes if node.member]
    reasons = [f"{node.name} {_trouble(node)}" for node in members if _serves(node, base_model)]
    heading = f"no node serves {base_model!r}"
    if reasons:
        heading = f"no node can take {base_model!r} now: {', '.join(reasons)}"
    served: dict[str, list[str]] = {}
    for node in members:
        for name in sorted(_served(node)):
            if can_take(node, name):
                served.setdefault(name, []).append(node.name)
    listed = [f"{name!r} by {', '.join(served[name])}" for name in sorted(served)]
    return f"{heading}; the cluster serves {'; '.join(listed) or 'nothing else'}"


def moves(nodes: Iterable[Node], claims: Iterable[Claim], *, most: int) -> list[Move]:
    """At most `most` moves: off draining nodes first, then from nodes with many keys to others.

    Keys are counted rather than queues, which change faster than a key can move. A key moves for
    balance only when its node has at least two more than the other one, and at least a fifth more:
    each move makes the sum of the squares of the numbers smaller, so that moves come to an end,
    and after all of them no other one is found. Keys that are under way count where they go to,
    and keys of nodes that are dead or silent are not moved: those nodes hand nothing over.
    """
    board = _Board(nodes, claims)
    if most > 0:
        for _ in chain(board.drain(), board.balance()):
            if len(board.moved) >= most:
                break
    return list(board.moved.values())


# -- sampling --------------------------------------------------------------------------------------


def prefix_hash(tokens: Iterable[int]) -> bytes:
    """What prompts that begin alike have in common: the same node has their prefix cached."""
    return blake2b(array("q", islice(tokens, _PREFIX_TOKENS)).tobytes(), digest_size=8).digest()


def route_sample(
    candidates: Iterable[Node],
    prefix: bytes,
    *,
    owner: Node,
    base_model: str,
    version: str,
    present: Collection[str] = (),
    running: Mapping[str, int] | None = None,
    headroom: int = 16,
) -> Node:
    """The node that computes one request for samples, with all of its sequences.

    `version` is the sampler's version and `present` has the ids of nodes that have loaded it; its
    `owner` has it always, and may compute it also while it drains. Rendezvous hashing of version
    and `prefix` keeps prompts that begin alike on one node; adding a node moves only prompts that
    go to it. A node is passed over while its load is above that of the least loaded one by a
    quarter and `headroom`; when that holds for all nodes with the version, another node fetches
    it. `running` has the requests under way by node as far as the caller knows: reports of load
    are seconds old.
    """
    nodes = {node.node_id: node for node in candidates if can_take(node, base_model)}
    nodes[owner.node_id] = owner
    known = running or {}
    loads = {name: max(_work(node.load), known.get(name, 0)) for name, node in nodes.items()}
    least = min(loads.values())
    fit = [name for name in nodes if loads[name] <= least + least // 4 + headroom]
    ready = [name for name in fit if name == owner.node_id or name in present]
    if ready:
        seed = _seed(version, prefix)
        return nodes[max(ready, key=lambda name: (_score(name, owner, seed), name))]
    # Without the prefix: a version is fetched by one more node at a time, not by all at once.
    seed = _seed(version)
    return nodes[max(fit, key=lambda name: (_hash(name, seed), name))]


def _score(name: str, owner: Node, seed: bytes) -> float:
    """Of weighted rendezvous hashing; the highest one wins."""
    share = (_hash(name, seed) + 1) / (2**64 + 1)
    weight = _OWNER_WEIGHT if name == owner.node_id else 1.0
    return weight / max(-math.log(share), 1e-300)


# -- comparing nodes -------------------------------------------------------------------------------


def _rank(node: Node, owner: str, seed: bytes) -> tuple[int, int, int, int, int]:
    """The node with the smallest one is the best for a key."""
    load = node.load
    return (
        -_free_eighths(load),
        load.models + load.tenants.get(owner, 0),
        _work(load),
        -_hash(node.node_id, seed),
        node.number,
    )


def _free_eighths(load: NodeLoad) -> int:
    """Memory that is free, rounded down; all of it where the capacity is not known."""
    if load.capacity_bytes <= 0:
        return _EIGHTHS
    return max(0, _EIGHTHS - -(-_EIGHTHS * load.resident_bytes // load.capacity_bytes))


def _work(load: NodeLoad) -> int:
    return load.queued_ops + load.samples_running


def _served(node: Node) -> set[str]:
    return {model.name for model in node.base_models}


def _serves(node: Node, base_model: str) -> bool:
    return any(model.name == base_model for model in node.base_models)


def _trouble(node: Node) -> str:
    if node.expired:
        return "is silent (its lease has run out)"
    return "is draining" if node.state == "draining" else "has no engine (its role is api)"


def _hash(node_id: str, seed: bytes) -> int:
    """A number of 64 bits; the node with the highest one wins what the seed stands for."""
    return int.from_bytes(blake2b(node_id.encode(), key=seed, digest_size=8).digest(), "big")


def _seed(*parts: str | bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


# -- moving keys -----------------------------------------------------------------------------------


class _Board:
    """Where every key is, changed by one move after the other."""

    def __init__(self, nodes: Iterable[Node], claims: Iterable[Claim]) -> None:
        ordered = sorted(nodes, key=lambda node: (node.number, node.node_id))
        self._nodes = {node.node_id: node for node in ordered}
        self._takers = [node for node in ordered if can_take(node, None)]
        # Mutable state: the keys of each node that may move, all of its keys counted, those of
        # each tenant counted, and the moves so far by key.
        self._movable: dict[str, dict[str, Claim]] = {name: {} for name in self._nodes}
        self._counts: Counter[str] = Counter()
        self._tenants: Counter[tuple[str, str]] = Counter()
        self.moved: dict[str, Move] = {}
        for claim in sorted(claims, key=lambda claim: claim.key):
            self._add(claim)

    def _add(self, claim: Claim) -> None:
        source = self._nodes.get(claim.node_id)
        if source is None or source.expired or not source.member:
            return
        target = self._nodes.get(claim.wanted or "")
        under_way = target is not None and can_take(target, claim.base_model)
        at = target.node_id if target is not None and under_way else source.node_id
        self._count(claim, at, 1)
        if not under_way or at == source.node_id:
            self._movable[at][claim.key] = claim

    def _count(self, claim: Claim, at: str, change: int) -> None:
        self._counts[at] += change
        self._tenants[at, claim.owner] += change

    def drain(self) -> Iterator[None]:
        """Move keys off draining nodes, as far as other nodes can take them, one each time."""
        for node in self._nodes.values():
            leaving = self._movable[node.node_id] if node.state == "draining" else {}
            for claim in list(leaving.values()):
                target = self._for_drained(claim)
                if target is not None:
                    self._move(claim, node, target, "drain")
                    yield

    def _for_drained(self, claim: Claim) -> Node | None:
        seed = _seed(claim.owner, claim.key)

        def rank(node: Node) -> tuple[int, int, int, int]:
            at = node.node_id
            crowd = self._counts[at] + self._tenants[at, claim.owner]
            return (-_free_eighths(node.load), crowd, _work(node.load), -_hash(at, seed))

        fit = [node for node in self._takers if _serves(node, claim.base_model)]
        return min(fit, key=rank, default=None)

    def balance(self) -> Iterator[None]:
        """Move a key each time between the two nodes that differ most, until none differ enough."""
        while (found := self._widest()) is not None:
            self._move(*found, "balance")
            yield

    def _widest(self) -> tuple[Claim, Node, Node] | None:
        for source, target in sorted(self._pairs(), key=self._order):
            claim = self._choice(source, target)
            if claim is not None:
                return claim, source, target
        return None

    def _pairs(self) -> Iterator[tuple[Node, Node]]:
        """Nodes that differ enough, except from one with free memory to one without."""
        for source in self._takers:
            count = self._counts[source.node_id]
            slack = max(2, -(-count // _SLACK_SHARE))
            for target in self._takers:
                crowded = not _free_eighths(target.load) and _free_eighths(source.load)
                if count - self._counts[target.node_id] >= slack and not crowded:
                    yield source, target

    def _order(self, pair: tuple[Node, Node]) -> tuple[int, int]:
        """The widest difference first; of targets with as many keys, the one with most memory."""
        source, target = pair
        gap = self._counts[source.node_id] - self._counts[target.node_id]
        return (-gap, -_free_eighths(target.load))

    def _choice(self, source: Node, target: Node) -> Claim | None:
        """The key to move: of the tenant it spreads best, and that has moved least."""

        def rank(claim: Claim) -> tuple[int, int, str]:
            here = self._tenants[source.node_id, claim.owner]
            there = self._tenants[target.node_id, claim.owner]
            return (there - here, claim.epoch, claim.key)

        served = _served(target)
        movable = self._movable[source.node_id].values()
        return min((c for c in movable if c.base_model in served), key=rank, default=None)

    def _move(
        self, claim: Claim, source: Node, target: Node, reason: Literal["drain", "balance"]
    ) -> None:
        del self._movable[source.node_id][claim.key]
        self._movable[target.node_id][claim.key] = claim
        self._count(claim, source.node_id, -1)
        self._count(claim, target.node_id, 1)
        # A key that moves on is one move, from where it is now.
        first = self.moved.get(claim.key)
        if first is not None:
            source, reason = first.source, first.reason
        if target is source:
            del self.moved[claim.key]
        else:
            self.moved[claim.key] = Move(claim=claim, source=source, target=target, reason=reason)
