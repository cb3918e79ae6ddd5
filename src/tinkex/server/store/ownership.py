"""Which node owns what: nodes with leases, and claims of nodes on keys.

A key is what one node owns at a time: a model with its operations and the samplers that were
published from it (`model_id`), or another sampler with its samples (`sampler_id`). A node has one
lease for everything it owns. When the lease has run out, another node may declare it dead: from
then on no write of that node is accepted, and its claims go to others. A node that was declared
dead never returns; its process starts again as a new node.

Times are those of the database's clock, so that the clocks of nodes may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tinkex.server.store.records import Occupied, Reserved, StoredSampler

NODE_VERSION: Final = 1
"""Of what nodes send each other and write for each other; nodes of one cluster have the same."""
NodeState = Literal["alive", "draining", "dead", "left"]
MEMBER_STATES: Final = ("alive", "draining")
"""Of nodes that have not ended; their leases may have run out."""
NodeRole = Literal["full", "api"]
"""`api` has no engine: it owns nothing, and passes requests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """A base model that a node serves, as other nodes need to know it."""

    name: str
    max_context_length: int
    vocab_size: int
    tokenizer_id: str | None = None
    arch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """What a node has to do, as it reported with its last renewal."""

    models: int = 0
    """Models that it owns and that are open."""
    resident_bytes: int = 0
    queued_ops: int = 0
    samples_running: int = 0
    tenants: dict[str, int] = field(default_factory=dict[str, int])
    """Open models by tenant."""
    capacity_bytes: int = 0
    """What adapters may take on its device; 0 is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One start of a server process that has joined. `node_id` names this start only."""

    node_id: str
    name: str
    url: str
    version: int
    """Of the protocol between nodes; all nodes of a cluster have the same."""
    release: str = ""
    role: NodeRole = "full"
    base_models: tuple[NodeModel, ...] = ()
    state: NodeState = "alive"
    number: int = 0
    """Order of joining. The lowest one that is alive does what one node has to do."""
    joined_at: float = 0.0
    lease_until: float = 0.0
    expired: bool = False
    """Whether the lease had run out when the record was read."""
    load: NodeLoad = field(default_factory=NodeLoad)

    @property
    def member(self) -> bool:
        """Whether it has not ended."""
        return self.state in MEMBER_STATES

    @property
    def silent(self) -> bool:
        """Whether its lease has run out, and no other node has noticed yet."""
        return self.expired and self.member

    @property
    def serving(self) -> bool:
        """Whether it may be given work."""
        return self.state == "alive" and not self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which node owns a key. `epoch` grows by one with every new owner."""

    key: str
    node_id: str
    epoch: int
    owner: str
    """The tenant."""
    base_model: str
    since: float = 0.0
    wanted: str | None = None
    """The node that the present owner is to hand it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a node learns when it joins."""

    node: Node
    secret: bytes = field(repr=False)
    """Shared by all nodes of the cluster; signs what they send each other, and links."""
    now: float = 0.0
    alone: bool = True
    """Whether no other node was alive."""


class LeaseLostError(StorageError):
    """This node was declared dead, so nothing it writes is accepted any more.

    A client may send the request again: another node answers it.
    """

    code = "lease_lost"
    retryable = False

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.out_of_reach = True


class ClaimLostError(StorageError):
    """This node does not own a key that it wrote for; the node that does can be asked."""

    code = "claim_lost"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.out_of_reach = True


def claim_key(sampler: StoredSampler) -> str:
    """The key of a sampler: that of its model, if it was published from one."""
    return sampler.model_id or sampler.sampler_id


class Ownership(Protocol):
    """The part of a store that says which node owns what.

    After `join`, every write of this store is accepted only while this node is not dead, and
    results, snapshots and samplers of a key only under the epoch that was adopted.
    """

    async def join(self, cluster: str, node: Node, lease_s: float) -> Membership:
        """Become a node; raises `StorageError` for another cluster's name or another version.

        It takes the store's lock, shared with other nodes; SQLite has only one. Keys that were
        unfinished before are not known until they are adopted.
        """
        ...

    async def renew(self, lease_s: float, load: NodeLoad) -> float:
        """Renew the lease, also after it has run out; returns the time of the database.

        Raises `LeaseLostError` when this node was declared dead.
        """
        ...

    async def announce(self, base_models: Sequence[NodeModel]) -> None:
        """Say which base models this node serves: its engine is ready."""
        ...

    async def leave(self) -> None:
        """End the membership; claims that are left are those of a dead node."""
        ...

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """Ask a node to hand over what it owns and to take nothing new; False if unknown.

        `undo` ends that: what was not handed over stays.
        """
        ...

    async def nodes(self) -> Sequence[Node]:
        """All nodes that have joined and are not forgotten, in order of joining."""
        ...

    async def declare_dead(self, node_id: str) -> bool:
        """Declare a node dead if its lease has run out; False when it has not."""
        ...

    async def forget_nodes(self, before: float) -> int:
        """Forget nodes that ended before a time and own nothing."""
        ...

    async def claim(self, key: str, node_id: str, *, owner: str, base_model: str) -> Claim:
        """Give a new key to a node; of a known key, the claim that there is."""
        ...

    async def reassign(self, claim: Claim, node_id: str) -> Claim | None:
        """Give a key to another node, if the claim is still this one.

        Only its owner may do that, or anybody when the owner is dead or has left.
        """
        ...

    async def want(self, key: str, node_id: str | None) -> bool:
        """Ask a key's owner to hand it to another node; False when there is no such claim."""
        ...

    async def release(self, claim: Claim) -> bool:
        """Forget the claim of a key that is over, if it is still this one."""
        ...

    async def get_claim(self, key: str) -> Claim | None: ...
    async def claims(self, node_ids: Iterable[str] | None = None) -> Sequence[Claim]:
        """The claims of these nodes, or all."""
        ...

    async def reserve(self, wanted: Reserved, *, max_bytes: int, max_checkpoints: int) -> Occupied:
        """Hold room in an owner's quota, if all nodes together leave it; what there is besides.

        A reservation with the same id is replaced. Those of nodes that end are forgotten.
        """
        ...

    async def unreserve(self, reservation_id: str) -> None:
        """Hold it no longer: what it was for is stored, or will not be."""
        ...

    async def adopt(self, claim: Claim) -> None:
        """Read what the database has of a key into memory: this node owns it from now on."""
        ...

    def give_up(self, claim: Claim) -> Sequence[str]:
        """Drop what memory has of a key that this node hands over.

        Returns the ids of its samples, which are lost, so that their waiters can be woken.
        """
        ...

    def on_hint(self, hint: Callable[[str], None]) -> None:
        """Call `hint` on the event loop when another node has changed something.

        Hints may be lost or come twice; a poll finds the same. They are `claim KEY NODE` with the
        node that owns the key now, `node ID`, `session ID`, `key ID` of an API key that was
        revoked, and `all` after a connection was lost. There are none before `join`.
        """
        ...
