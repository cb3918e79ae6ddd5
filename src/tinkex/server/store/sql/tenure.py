"""What a node may write: anything until it is declared dead, and for a key what it has adopted.

The fence locks the node's own row against the statement that declares it dead, until the
transaction ends. While a node is not dead, only the node itself gives its claims away, over the
same connection: so a claim that was read after the fence is valid until the commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, exists, select

from tinkex.server.store.ownership import MEMBER_STATES, ClaimLostError, LeaseLostError
from tinkex.server.store.sql.schema import claims, nodes

if TYPE_CHECKING:
    from sqlalchemy import Connection

# SQLite ignores the lock and needs none: one connection writes at a time.
_FENCE = (
    select(nodes.c.state)
    .where(nodes.c.node_id == bindparam("node_id"))
    .with_for_update(read=True, key_share=True)
)
HELD = exists().where(
    claims.c.key == bindparam("claim_key"),
    claims.c.node_id == bindparam("claim_node_id"),
    claims.c.epoch == bindparam("claim_epoch"),
)
"""Whether the claim of a `Tenure` is valid, as a condition of a statement."""
_HELD = select(HELD)


@dataclass(frozen=True, slots=True)
class NodeFence:
    """This process as a node. `number` is the order of joining."""

    node_id: str
    number: int

    def check(self, connection: Connection) -> None:
        """Raise unless this node is a member until the transaction ends."""
        state = connection.execute(_FENCE, {"node_id": self.node_id}).scalar_one_or_none()
        if state not in MEMBER_STATES:
            raise lease_lost(self.node_id, state)


def lease_lost(node_id: str, state: str | None) -> LeaseLostError:
    """The error of a node that is no member any more."""
    reason = "has left the cluster" if state == "left" else "was declared dead by another node"
    return LeaseLostError(f"Node {node_id} {reason}: nothing it writes is accepted any more.")


@dataclass(frozen=True, slots=True)
class Tenure:
    """The claim under which a node writes for a key."""

    key: str
    node_id: str
    epoch: int

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of `HELD`."""
        return {
            "claim_key": self.key,
            "claim_node_id": self.node_id,
            "claim_epoch": self.epoch,
        }

    def check(self, connection: Connection) -> None:
        """Raise unless the claim is valid until the transaction ends."""
        if not connection.execute(_HELD, self.parameters).scalar_one():
            raise claim_lost(self.key, self.node_id)


def claim_lost(key: str, node_id: str) -> ClaimLostError:
    """The error of a node that writes for a key that it does not own."""
    return ClaimLostError(f"Node {node_id} does not own {key}; another node may.")
