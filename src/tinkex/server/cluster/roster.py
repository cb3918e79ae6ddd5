"""The nodes of the cluster, as this node read them last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.errors import TinkerError
from tinkex.server.cluster.forwarding import Elsewhere
from tinkex.server.cluster.placement import can_take, place, why_not

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.server.store.ownership import Claim, Node, NodeModel


class NoNodeError(TinkerError):
    """No node can take a key now."""

    code = "no_node"


class Roster:
    """All nodes, this one among them. Used from one event loop."""

    def __init__(self, node: Node) -> None:
        self.node_id = node.node_id
        # Mutable state: read from the database every few seconds.
        self.nodes: dict[str, Node] = {node.node_id: node}

    @property
    def node(self) -> Node:
        """This node, as the database has it."""
        return self.nodes[self.node_id]

    @property
    def members(self) -> dict[str, Node]:
        """The nodes that have not ended, by id; their leases may have run out."""
        return {name: node for name, node in self.nodes.items() if node.member}

    @property
    def ended(self) -> list[str]:
        """The ids of nodes that are dead or have left."""
        return [name for name, node in self.nodes.items() if not node.member]

    @property
    def leads(self) -> bool:
        """Whether this node does what one node has to do."""
        able = [node.number for node in self._alive() if node.role == "full"]
        return self.node.role == "full" and self.node.number <= min(able, default=0)

    @property
    def base_models(self) -> dict[str, NodeModel]:
        """The base models of all nodes, by name."""
        return {model.name: model for node in self._alive() for model in node.base_models}

    @property
    def remembered(self) -> dict[str, NodeModel]:
        """The base models of all nodes that are known, also of those that ended a while ago."""
        found = {model.name: model for node in self.nodes.values() for model in node.base_models}
        if not found:
            raise NoNodeError("No node of the cluster has a base model yet; try again.")
        return found

    @property
    def serving(self) -> dict[str, list[str]]:
        """The names of the nodes that serve each base model."""
        found: dict[str, list[str]] = {}
        for node in self._alive():
            for model in node.base_models:
                found.setdefault(model.name, []).append(node.name)
        return found

    def update(self, nodes: Iterable[Node]) -> None:
        """Take over what was read."""
        self.nodes = {node.node_id: node for node in nodes}

    def has(self, node_id: str) -> bool:
        """Whether a node is there and its lease has not run out."""
        node = self.nodes.get(node_id)
        return node is not None and node.member and not node.expired

    def mark_dead(self, node: Node) -> None:
        """Note that a node was declared dead."""
        self.nodes[node.node_id] = replace(node, state="dead")

    def at_engine(self, base_model: str | None = None) -> None:
        """Raise `Elsewhere` unless this node can compute with a base model, or with any."""
        able = [node for node in self.nodes.values() if can_take(node, base_model)]
        if not able and base_model is None:
            raise NoNodeError("no node of the cluster has an engine that is ready; try again")
        if not able:
            raise NoNodeError(why_not(self.nodes.values(), base_model or ""))
        if all(node.node_id != self.node_id for node in able):
            first, *others = sorted(able, key=lambda node: node.load.samples_running)
            raise Elsewhere(first, base_model or "an engine", others)

    def place_new(self, key: str, owner: str, base_model: str, *, here: bool = False) -> Node:
        """The node for a key that nobody owns: this one, if wished and possible, or the best."""
        if here and can_take(self.node, base_model):
            return self.node
        node = place(self.nodes.values(), base_model, owner, key=key)
        if node is None:
            raise NoNodeError(why_not(self.nodes.values(), base_model))
        return node

    def place_orphan(self, claim: Claim) -> Node | None:
        """The node that takes over a key whose owner has ended, if one can."""
        return place(self.nodes.values(), claim.base_model, claim.owner, key=claim.key)

    def handover_target(self, claim: Claim) -> Node | None:
        """The node that is to have a key of this one: the wanted one, or any if this one drains."""
        wanted = self.nodes.get(claim.wanted or "")
        if wanted is not None and wanted.serving and wanted.node_id != self.node_id:
            return wanted
        if self.node.state != "draining":
            return None
        return place(
            self.nodes.values(),
            claim.base_model,
            claim.owner,
            key=claim.key,
            avoid=(self.node_id,),
        )

    def expect(self, claim: Claim) -> None:
        """Count a key for a node until it reports it, so that of a burst each has its share."""
        node = self.nodes.get(claim.node_id)
        if node is None:
            return
        tenants = {**node.load.tenants, claim.owner: node.load.tenants.get(claim.owner, 0) + 1}
        load = replace(node.load, models=node.load.models + 1, tenants=tenants)
        self.nodes[claim.node_id] = replace(node, load=load)

    def _alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if self.has(node.node_id)]
